"""The jobs in the engine, how each of them drafts now, and those that have to run alone."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

from alphaloop.deciding.decision import Reason
from alphaloop.deciding.policy import Decision, DraftSetting
from alphaloop.errors import DecodeFailed, EngineSick, reason_of
from alphaloop.messages import Mode
from worker.claims import ClaimedJob
from worker.engine import Engine, FailedRequest, Generation, Step
from worker.lanes import LaneKey

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunningJob:
    """A job in the engine."""

    claimed: ClaimedJob
    decision: Decision
    decided_together: UUID  #: the same for jobs that one decision was about
    started_at: datetime
    setting: DraftSetting  #: how it drafts now; at its start, how it is admitted
    is_control: bool = False  #: whether it is decoded vanilla to its end to be compared with what was decided

    @property
    def job_id(self) -> str:
        """The job's."""
        return self.claimed.job_id

    @property
    def lane(self) -> LaneKey:
        """The job's."""
        return self.claimed.ready.lane

    @property
    def admitted(self) -> Decision:
        """What the engine is told at its start: the decision, unless the job starts as control of the experiment."""
        if self.setting == self.decision.setting:
            return self.decision
        return replace(
            self.decision,
            mode=Mode.SPECULATIVE if self.setting.drafter else Mode.VANILLA,
            drafter=self.setting.drafter,
            draft_revision=self.decision.draft_revision if self.setting.drafter else None,
            num_draft_tokens=self.setting.num_draft_tokens,
        )

    @property
    def recorded(self) -> Decision:
        """What its row and its result say: the decision; of a control request, that it is one and what was decided."""
        if not self.is_control:
            return self.decision
        told = "decoded vanilla as a control request, to measure what speculation gains; decided was: "
        return replace(self.decision, reason=Reason.CONTROL, explanation=told + self.decision.explanation)

    @property
    def queue_s(self) -> float:
        """Seconds from its message, by the broker's clock, to its start."""
        timestamp_ms = self.claimed.ready.delivery.record.timestamp_ms
        return max(0.0, self.started_at.timestamp() - timestamp_ms / 1000) if timestamp_ms else 0.0


@dataclass(slots=True)
class Stepped:
    """What one engine step brought."""

    step: Step | None = None  #: None where it failed
    lanes: tuple[LaneKey, ...] = ()  #: of the sequences that were in it and did not wait for a server
    finished: list[tuple[RunningJob, Generation]] = field(default_factory=list)
    failed: list[tuple[RunningJob, DecodeFailed]] = field(default_factory=list)
    #: By their own fault, as the engine made sure; the others in the engine go on.
    refused: list[tuple[RunningJob, FailedRequest]] = field(default_factory=list)
    interrupted: list[RunningJob] = field(default_factory=list)  #: to be decoded again, under a new attempt


class RunningJobs:
    """What the engine runs. One thread owns it.

    A job with which a worker died, or that failed before, runs alone, so that it takes no others down with it. So does
    every job that was in a step which failed, so that one bad job fails alone. While such a job waits or runs, no other
    starts.

    Whatever an engine raises, the jobs in it have failed to decode, and the worker goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, RunningJob] = {}
        self._to_run_alone: deque[ClaimedJob] = deque()
        self._is_alone = False
        self._redraft_failure: DecodeFailed | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """Jobs in the engine that do not wait for a server."""
        return len(self._running) - len(self._engine.load().waiting)

    @property
    def num_to_run_alone(self) -> int:
        """Jobs that wait until the engine is empty."""
        return len(self._to_run_alone)

    def num_free(self) -> int:
        """How many other jobs may start now."""
        if self._to_run_alone or (self._is_alone and self.num_decoding):
            return 0
        return self._engine.load().num_free

    def next_alone(self) -> ClaimedJob | None:
        """The job that runs alone next, once nothing else is decoded. Jobs may wait for a server meanwhile."""
        if not self._to_run_alone or self.num_decoding:
            return None
        return self._to_run_alone.popleft()

    def run_alone_later(self, claimed: Iterable[ClaimedJob]) -> None:
        """These run one by one, when what runs has ended."""
        self._to_run_alone.extend(claimed)

    def has_room(self, claimed: ClaimedJob) -> bool:
        """Whether the engine has a slot and the memory for the whole job."""
        return self._engine.has_room(claimed.ready.prepared)

    def start(self, job: RunningJob, *, alone: bool = False) -> None:
        """Give a job to the engine, which has room for it. Raises DecodeFailed."""
        try:
            self._engine.admit(job.claimed.ready.prepared, job.admitted)
        except Exception as error:
            raise _decode_failed("admitting a job", error) from error
        self._running[job.job_id] = job
        self._is_alone = alone

    def redraft(self, setting_of: Callable[[RunningJob], DraftSetting]) -> None:
        """Have every sequence draft as `setting_of` says from its next round on. A failure fails the next step."""
        for job in self._running.values():
            setting = setting_of(job)
            if setting == job.setting:
                continue
            try:
                self._engine.redraft(job.job_id, setting.drafter, setting.num_draft_tokens)
            except Exception as error:
                self._redraft_failure = _decode_failed("changing how a job drafts", error)
                return
            job.setting = setting

    def step(self) -> Stepped:
        """One round of everything that runs. A failed step empties the engine; its jobs run alone later.

        Raises EngineSick where the engine says so itself; its jobs stay here.
        """
        waiting = self._engine.load().waiting
        lanes = tuple(job.lane for job_id, job in self._running.items() if job_id not in waiting)
        if (failure := self._redraft_failure) is not None:
            return self._after_failure(failure, lanes)
        try:
            step = self._engine.step()
        except EngineSick:
            raise
        except Exception as error:
            return self._after_failure(_decode_failed(f"a step over {len(lanes)} jobs", error), lanes)
        finished = [(self._running.pop(generation.job_id), generation) for generation in step.finished]
        refused = [(self._running.pop(failed.job_id), failed) for failed in step.failed]
        interrupted = [self._running.pop(job_id) for job_id in step.interrupted]
        return Stepped(step, lanes, finished, refused=refused, interrupted=interrupted)

    def overdue(self, now: datetime) -> list[str]:
        """Those of the jobs here whose deadline has passed."""
        here = (*(job.claimed for job in self._running.values()), *self._to_run_alone)
        return [claimed.job_id for claimed in here if claimed.ready.job.is_expired(now)]

    def drop(self, job_ids: Collection[str]) -> list[ClaimedJob]:
        """Drop those of the jobs that are here; returns them."""
        dropped = []
        for job_id in [job_id for job_id in job_ids if job_id in self._running]:
            self._engine.cancel(job_id)
            dropped.append(self._running.pop(job_id).claimed)
        waiting = [claimed for claimed in self._to_run_alone if claimed.job_id in job_ids]
        for claimed in waiting:
            self._to_run_alone.remove(claimed)
        return dropped + waiting

    def give_back(self) -> list[ClaimedJob]:
        """Empty the engine; returns every job that was here."""
        self._abandon()
        left = [job.claimed for job in self._running.values()]
        self._running.clear()
        return left + self.take_waiting_alone()

    def take_waiting_alone(self) -> list[ClaimedJob]:
        """Take out the jobs that wait to run alone; what runs goes on."""
        left = list(self._to_run_alone)
        self._to_run_alone.clear()
        return left

    def absent(self) -> list[RunningJob]:
        """The jobs that wait for servers which are all away."""
        return [self._running[job_id] for job_id in self._engine.load().absent & self._running.keys()]

    def by_id(self) -> Mapping[str, RunningJob]:
        """What runs."""
        return self._running

    def _after_failure(self, error: DecodeFailed, lanes: tuple[LaneKey, ...]) -> Stepped:
        self._redraft_failure = None
        self._abandon()
        jobs = list(self._running.values())
        self._running.clear()
        if len(jobs) == 1:
            return Stepped(None, lanes, failed=[(jobs[0], error)])
        log.warning(
            "a step over %d jobs failed, each is decoded alone: %s", len(jobs), error, extra={"action": "batch_split"}
        )
        self._to_run_alone.extend(job.claimed for job in jobs)
        return Stepped(None, lanes)

    def _abandon(self) -> None:
        """Empty the engine. One that cannot even be emptied fails the next test of it, so that is only logged."""
        try:
            self._engine.abandon()
        except Exception as error:
            _decode_failed("emptying the engine", error)


def _decode_failed(doing: str, error: Exception) -> DecodeFailed:
    """The failure to report for whatever an engine raised.

    The text of a foreign exception is left out, because it may quote the prompt. The log leaves it out too.
    """
    if isinstance(error, DecodeFailed):
        return error
    log.error("%s failed", doing, exc_info=error, extra={"action": "engine_raised"})
    return DecodeFailed(f"{doing} failed: {reason_of(error)}")
