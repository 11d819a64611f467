"""The jobs in the engine: how each of them drafts now, which have to run alone, and which are poison.

A job can kill its worker (`Suspects`), or fail in the engine (`Blame`). Both judge it alone: no death and no failure
counts against a job that shared the engine with others, as far as that can be known.

A crash counts for every job that the dead worker had claimed, also for those that only waited for a slot. If suspects
were decoded one by one but claimed together, all of them would be given up with the one that kills each worker. A
suspect that is the only claim of its worker is the only job that the next crash counts for.

Workers may be killed from outside, as often as every few seconds (a rollout, a machine without memory). The jobs that
then happen to be alone are not to be given up for it. So the next suspect is drawn at random, because the oldest would
always be the one. And a suspect with which a worker died alone waits until its next worker has shown that it lives: for
`delay_s` after that worker's first claim, and twice as long after each further death.

After a job failed alone, the engine decodes a text that it must be able to decode. If it cannot, nothing is said
against the job. Requests that kill inference servers are judged by worker/servers/fleet.py.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from typing import Final
from uuid import UUID

from alphaloop import page
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.engine import Engine, FailedRequest, Generation, PreparedJob, Sampling, Step
from alphaloop.errors import DecodeFailed, EngineSick, reason_of
from alphaloop.liveness import beat
from alphaloop.messages import Body, Failure, Job, Mode, Purpose
from worker.admission import LaneKey, Line
from worker.claims import ClaimedJob, Claims, LeaseKeeper
from worker.dead_letters import JobRetries
from worker.intake.validation import ReadyJob

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
    def line(self) -> Line:
        """The job's."""
        return self.claimed.ready.line

    @property
    def is_streamed(self) -> bool:
        """Whether its text is read while it is written."""
        return self.claimed.ready.job.body.stream

    @property
    def admitted(self) -> Decision:
        """The decision that the engine gets: the job's own, unless the job starts as control of the experiment."""
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
        preface = "decoded vanilla as a control request, to measure what speculation gains; decided was: "
        return replace(self.decision, reason=Reason.CONTROL, explanation=preface + self.decision.explanation)

    @property
    def queue_s(self) -> float:
        """Seconds from its message, by the broker's clock, to its start."""
        return self.claimed.waited_s(self.started_at)


@dataclass(slots=True)
class Stepped:
    """What one engine step brought."""

    step: Step | None = None  #: None where it failed
    lines: tuple[Line, ...] = ()  #: of the sequences that were in it and did not wait for a server
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
        load = self._engine.load()
        return len(self._running) - len(load.waiting | load.held)

    @property
    def _num_to_end(self) -> int:
        """Jobs that may be decoded at any moment: also those that are held for the sake of others."""
        return len(self._running) - len(self._engine.load().waiting)

    @property
    def num_to_run_alone(self) -> int:
        """Jobs that wait until the engine is empty."""
        return len(self._to_run_alone)

    def num_free(self) -> int:
        """How many other jobs may start now."""
        if self._to_run_alone or (self._is_alone and self._num_to_end):
            return 0
        return self._engine.load().num_free

    def next_alone(self) -> ClaimedJob | None:
        """The job that runs alone next, once nothing else is decoded. Jobs may wait for their servers meanwhile."""
        return self._to_run_alone.popleft() if self._to_run_alone and not self._num_to_end else None

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
            if (setting := setting_of(job)) == job.setting:
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
        load = self._engine.load()
        waiting = load.waiting | load.held
        lines = tuple(job.line for job_id, job in self._running.items() if job_id not in waiting)
        if (failure := self._redraft_failure) is not None:
            return self._after_failure(failure, lines)
        try:
            step = self._engine.step()
        except EngineSick:
            raise
        except Exception as error:
            return self._after_failure(_decode_failed(f"a step over {len(lines)} jobs", error), lines)
        finished = [(self._running.pop(generation.job_id), generation) for generation in step.finished]
        refused = [(self._running.pop(failed.job_id), failed) for failed in step.failed]
        interrupted = [self._running.pop(job_id) for job_id in step.interrupted]
        return Stepped(step, lines, finished, refused=refused, interrupted=interrupted)

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

    def _after_failure(self, error: DecodeFailed, lines: tuple[Line, ...]) -> Stepped:
        self._redraft_failure = None
        self._abandon()
        jobs = list(self._running.values())
        self._running.clear()
        if len(jobs) == 1:
            return Stepped(None, lines, failed=[(jobs[0], error)])
        log.warning(
            "a step over %d jobs failed, each is decoded alone: %s", len(jobs), error, extra={"action": "batch_split"}
        )
        self._to_run_alone.extend(job.claimed for job in jobs)
        return Stepped(None, lines)

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


#: This number of failed jobs in a row, each followed by a failed test, and the engine is sick.
MOST_IN_A_ROW: Final = 3
#: Output of a test: enough rounds that a drafter drafts too.
NUM_TOKENS: Final = 16
#: A worker lives this long before it takes a job with which one died alone, twice as long for each further death.
#: Long enough that other workers answer what waits after it, short beside the time a lease takes to end.
SUSPECT_DELAY_S: Final = 5.0
_NAME: Final = "self-test"
_PROMPT: Final = "one two three four one two three four one two"


class Suspects:
    """Jobs with which a worker died, until this worker has no other claim. One thread owns it, the feed's."""

    def __init__(self, leases: LeaseKeeper, rng: random.Random, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = leases
        self._rng = rng
        self._clock = clock
        self._since: float | None = None  # the first claim of this worker
        self._waiting: list[ReadyJob] = []
        self._claimed = ""  # the job_id of the suspect claimed last
        self.absent: frozenset[str] = frozenset()  #: claimed jobs that wait for a server that is away

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting suspects."""
        return sum(ready.num_bytes for ready in self._waiting)

    @property
    def come_first(self) -> bool:
        """Whether a suspect waits or is being decoded: nothing else may be claimed."""
        return bool(self._waiting) or (self._leases.holds(self._claimed) and self._claimed not in self.absent)

    def set_aside(self, claims: Claims) -> list[tuple[float, ReadyJob]]:
        """Let the suspects that a group's claim left unclaimed wait.

        Returns those that come too early, with the time of `clock` from which they may be asked for. A suspect in
        `claims.to_decode` was asked for alone: it is this worker's only claim.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        for claimed in claims.to_decode:
            if claimed.num_crashes:
                self._claimed = claimed.job_id
        early: list[tuple[float, ReadyJob]] = []
        for suspect, num_crashes in claims.suspects:
            num_alone = num_crashes - 1
            due = self._since + (SUSPECT_DELAY_S * 2.0 ** (num_alone - 1) if num_alone else 0.0)
            if due > now:
                early.append((due, suspect))
            else:
                self._waiting.append(suspect)
        return early

    def next(self) -> ReadyJob | None:
        """Take out the suspect to claim now; None while this worker has a claim."""
        if not self._waiting or self._leases.num_held:
            return None
        return self._waiting.pop(self._rng.randrange(len(self._waiting)))

    def discard(self, unwanted: Callable[[ReadyJob], bool]) -> None:
        """Drop those for which `unwanted` holds (their partition went to another worker)."""
        self._waiting = [ready for ready in self._waiting if not unwanted(ready)]


@dataclass(eq=False)
class Blame:
    """Which of the jobs that failed have failed for good. One thread uses it, the loop's.

    After a job failed alone, the engine decodes the beginning of the last job that succeeded here, or a fixed prompt
    before the first one, in the same way. If this test passes, the failure was the job's. If the test fails too,
    nothing is said against the job, and it is tried again.

    `gone` is called with the lines of jobs that wait in Kafka for their next try.
    """

    engine: Engine
    running: RunningJobs
    retries: JobRetries
    _: KW_ONLY
    gone: Callable[[Sequence[Line]], object]
    now: Callable[[], datetime]

    def __post_init__(self) -> None:
        self._job = Job(job_id=_NAME, task=_NAME, body=Body(prompt=_PROMPT), purpose=Purpose.CONTROL)
        self._known = self.engine.prepare(self._job, Sampling(max_tokens=NUM_TOKENS, temperature=0.0))
        self._num_failed_in_a_row = 0
        self._error = ""

    def check(self) -> None:
        """Raise EngineSick when MOST_IN_A_ROW jobs failed, and the test after each of them, without a success."""
        if self._num_failed_in_a_row >= MOST_IN_A_ROW:
            num_jobs = self._num_failed_in_a_row
            raise EngineSick(
                f"{num_jobs} jobs in a row failed, and after each of them the self-test: {self._error}",
                hint=f"see {page('guides/operate.md')}, a worker ended with code 3",
            )

    def worked(self, prepared: PreparedJob) -> None:
        """The engine decoded this job to its end."""
        self._known = prepared
        self._num_failed_in_a_row = 0

    def failed_for_good(self, failed: Sequence[tuple[RunningJob, DecodeFailed]]) -> list[tuple[RunningJob, Failure]]:
        """The jobs that failed alone, by their own fault and for good.

        Others that have a try left wait for it in Kafka. Where the engine was at fault, they run again.
        """
        blamed = []
        for job, error in failed:
            if not self._is_job_to_blame(job.job_id, job.setting):
                self.running.run_alone_later([job.claimed])
            elif not self._is_tried_again(job, failure := Failure.of(error)):
                blamed.append((job, failure))
        return blamed

    def refused_for_good(self, refused: Sequence[tuple[RunningJob, FailedRequest]]) -> list[tuple[RunningJob, Failure]]:
        """The jobs that failed for good on a server; the others wait in Kafka for their next try."""
        blamed = []
        for job, failed in refused:
            failure = Failure.of(failed.error)
            if failed.is_final or not self._is_tried_again(job, failure):
                blamed.append((job, failure))
        return blamed

    def _is_job_to_blame(self, job_id: str, setting: DraftSetting) -> bool:
        """Test the engine, which is empty, because this job failed alone while it drafted as `setting` says.

        True: the failure is the job's. False: the engine failed the test too, so the job is to be tried again.
        """
        if (error := self._test(setting)) is None:
            self._num_failed_in_a_row = 0
            return True
        self._num_failed_in_a_row += 1
        self._error = error
        extra = {"action": "self_test_failed", "job_id": job_id, "num_in_a_row": self._num_failed_in_a_row}
        log.error("a job failed, and then the self-test: %s", error, extra=extra)
        return False

    def _is_tried_again(self, job: RunningJob, failure: Failure) -> bool:
        if not self.retries.put(job.claimed, failure, self.now()):
            return False
        self.gone([job.line])
        return True

    def _test(self, setting: DraftSetting) -> str | None:
        """What went wrong in a test of the engine; None when its text came to its end."""
        mode = Mode.SPECULATIVE if setting.num_draft_tokens else Mode.VANILLA
        decision = Decision(mode, setting.drafter, None, setting.num_draft_tokens, Reason.CONTROL, "self-test")
        sampling = replace(self._known.sampling, max_tokens=min(NUM_TOKENS, self._known.sampling.max_tokens))
        try:
            self.engine.abandon()
            self.engine.admit(PreparedJob(self._job, self._known.token_ids, sampling), decision)
            while self.engine.load().num_running:
                beat()
                self.engine.step()
        except Exception as error:
            return reason_of(error)
        return None
