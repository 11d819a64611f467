"""How each sequence drafts, as far as that is not settled by its decision: by what runs, and by the experiment.

`RoundSteering` sets drafter and k before each round. The distribution of a text does not depend on either, so they may
change between any two rounds. `RequestSteering` is for engines whose requests stay as they were admitted: it says how a
job is admitted. `MeasuredSteering` is for servers that draft as each request asks: they assign the arms of their own
rounds and report what they counted. What each counts, `SliceRecorder` stores. The loop's thread owns it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeAlias

from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.draft_lengths import LengthsTogether, RunningSequence
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import AsksServers, EngineIdentity, Generation, Served, Step
from alphaloop.experiment.assign import RequestDesign, RequestSchedule, RoundDesign, RoundSchedule
from alphaloop.experiment.figures import SpeedupSubject
from alphaloop.experiment.observe import Expected, RequestFacts, Slice, Treatment, TrialGroup
from alphaloop.experiment.rounds import FreeSequence, RoundTrials, Yielded, subject_of, task_and_bucket
from alphaloop.messages import Purpose
from alphaloop.store.switchback import SliceRow, SwitchbackStore
from worker.admission import LaneKey
from worker.running import RunningJob, RunningJobs

if TYPE_CHECKING:
    from worker.foundation import Foundation
    from worker.intake.validation import Validation
    from worker.presence import Presence

log = logging.getLogger(__name__)

#: A speed-up is computed anew at most so often: it reads a day of slices.
REFRESH_EVERY_S: Final = 10.0


class RoundSteering:
    """Sets drafters and k before each round and counts the round afterwards.

    `num_vanilla_tokens`: of a task, the first tokens of a streamed answer that are decoded vanilla, so that no draft
    model reads a prompt while a reader waits for them. Until then the sequence takes no part in the experiment.
    `rivals`: by drafter, the loaded drafter that it is on trial with.
    """

    def __init__(
        self,
        schedule: RoundSchedule,
        lengths: LengthsTogether,
        now: Callable[[], datetime],
        num_vanilla_tokens: Callable[[str], int] = lambda task: 0,
        rivals: Callable[[], Mapping[str, DrafterState]] = dict,
    ) -> None:
        self._lengths = lengths
        self._now = now
        self._rivals = rivals
        self._num_vanilla_tokens = num_vanilla_tokens
        self._first: dict[str, int] = {}  # by job_id of streams: tokens that are still to come vanilla, or 0
        self._running_ids: frozenset[str] = frozenset()
        self._wanted: dict[str, DraftSetting] = {}
        self._trials = RoundTrials(schedule)
        self._round_began = now()

    def begin(self, job_id: str, lane: LaneKey, decision: Decision, running: RunningJobs) -> DraftSetting:
        """As decided: the next round may change it."""
        return decision.setting

    def is_control(self, job_id: str) -> bool:
        """No job is control from its beginning to its end."""
        return False

    def steer(self, running: RunningJobs) -> None:
        """Set how every sequence drafts in the next round."""
        jobs = running.by_id()
        is_same = self._running_ids == jobs.keys()
        if not is_same:
            self._running_ids = frozenset(jobs)
            self._consider(list(jobs.values()))
        if self._trials.next_round() or not is_same:
            running.redraft(self._setting_of)
        self._round_began = self._now()

    def observe(self, step: Step) -> Sequence[Slice]:
        """Count the round that ran; returns the slices that ended with it."""
        for job_id, left in self._first.items():
            if left and (num_tokens := step.tokens_by_job.get(job_id, 0)):
                self._first[job_id] = max(0, left - num_tokens)
                if not self._first[job_id]:
                    self._running_ids = frozenset()  # it may draft now
        yielded = {
            job_id: Yielded(num_tokens, step.proposed_by_job.get(job_id, 0), step.sequences_by_job.get(job_id, 1))
            for job_id, num_tokens in step.tokens_by_job.items()
        }
        return self._trials.observe(
            yielded,
            started_at=self._round_began,
            wall_s=step.wall_s,
            num_running=step.batch,
            mean_context_tokens=float(step.context),
            has_prompt=step.num_prefill_tokens > 0 or step.num_draft_prefill_tokens > 0,
        )

    def close(self) -> Sequence[Slice]:
        """End all slices and return them: when the worker ends, or when a step failed."""
        return self._trials.close()

    def _consider(self, jobs: Sequence[RunningJob]) -> None:
        """Find every sequence's setting outside control slices, and the subjects' treatments."""
        self._first = {
            job.job_id: self._first.get(job.job_id, self._num_vanilla_tokens(job.lane.task))
            for job in jobs
            if job.is_streamed and not job.lane.is_measured
        }
        settings = self._lengths.settings([RunningSequence(job.lane, job.decision) for job in jobs], self._now())
        self._wanted = {job.job_id: setting for job, setting in zip(jobs, settings, strict=True)}
        # Jobs that were decided together share a decision.
        expected = {
            name: decision.expected for name, decision in {id(job.decision): job.decision for job in jobs}.items()
        }
        free: dict[str, FreeSequence] = {}
        rivals = self._rivals()
        for job in jobs:
            setting = self._wanted[job.job_id]
            if setting.drafter and _is_free(job.lane, job.decision) and not self._first.get(job.job_id):
                promised = expected[id(job.decision)] if job.decision.drafter == setting.drafter else None
                treatment = Treatment(setting.drafter, setting.num_draft_tokens)
                rival = rivals.get(setting.drafter)
                against = None if rival is None else Treatment(rival.name, rival.within(treatment.num_draft_tokens))
                free[job.job_id] = FreeSequence(_subject_of(job.lane), treatment, promised, against)
        self._trials.consider(free)

    def _setting_of(self, job: RunningJob) -> DraftSetting:
        wanted = self._wanted[job.job_id]
        if self._first.get(job.job_id):
            return DraftSetting(wanted.drafter, 0)
        if not self._trials.is_control(job.job_id):
            return wanted
        if (rival := self._trials.rival_of(job.job_id)) is not None:
            return DraftSetting(rival.drafter, rival.num_draft_tokens)
        # Paused, not closed: after the slice the drafter continues where it was.
        return DraftSetting(wanted.drafter, 0)


@dataclass(eq=False)
class RequestSteering:
    """Draws the arm of each request when it starts.

    A request that had another drafter than its arm's, or another draft length, is not counted, in either arm. While
    other workers ask the same servers, requests are on trial only where the load of every server is known: in a
    simulation two workers that counted their own requests alone found a speed-up of .77 where there was none, and no
    interval held the truth.

    `num_peers`: other workers that ask the same servers; `is_whole_load_known`: of every server of the fleet.
    """

    schedule: RequestSchedule
    now: Callable[[], datetime]
    num_peers: Callable[[], int]
    is_whole_load_known: Callable[[], bool]

    def __post_init__(self) -> None:
        self._assigned: dict[str, _Assigned] = {}
        self._reports_rounds: set[str] = set()  # endpoints that reported a request's rounds once
        self._seen_at = self.now()
        self._is_blind = False

    def begin(self, job_id: str, lane: LaneKey, decision: Decision, running: RunningJobs) -> DraftSetting:
        """Vanilla in a control slice of its subject, otherwise as decided."""
        self.steer(running)
        drafter, num_draft_tokens = decision.setting.drafter, decision.setting.num_draft_tokens
        if not (drafter and num_draft_tokens and _is_free(lane, decision)) or self._lacks_load():
            return decision.setting
        trial = TrialGroup(_subject_of(lane), Treatment(drafter, num_draft_tokens))
        speculates = self.schedule.start(job_id, trial, self._seen_at)
        setting = decision.setting if speculates else DraftSetting()
        self._assigned[job_id] = _Assigned(setting, self._seen_at, decision.expected)
        return setting

    def is_control(self, job_id: str) -> bool:
        """Whether the request is decoded vanilla to its end, to be compared with what was decided."""
        assigned = self._assigned.get(job_id)
        return assigned is not None and assigned.setting.drafter is None

    def steer(self, running: RunningJobs) -> None:
        """Nothing that runs can change; what was cancelled, or not taken by the engine, is gone since the last look."""
        jobs = running.by_id()
        for job_id in [job_id for job_id in self._assigned if job_id not in jobs]:
            self._leave(job_id)
        self._pass_time()

    def observe(self, step: Step) -> Sequence[Slice]:
        """Count the requests that ended."""
        self._pass_time()
        for generation in step.finished:
            if (assigned := self._assigned.pop(generation.job_id, None)) is not None:
                self.schedule.end(generation.job_id, self._facts(generation, assigned), self._seen_at)
        for job_id in (*(failed.job_id for failed in step.failed), *step.interrupted):
            self._leave(job_id)
        return self.schedule.take()

    def close(self) -> Sequence[Slice]:
        """What was counted of requests that ended; those that run are not counted."""
        self._assigned.clear()
        return self.schedule.close()

    def _pass_time(self) -> None:
        self._seen_at = max(self.now(), self._seen_at)

    def _lacks_load(self) -> bool:
        """Whether others send requests to the servers, and no server shows how many."""
        is_blind = self.num_peers() > 0 and not self.is_whole_load_known()
        if is_blind != self._is_blind:
            self._is_blind = is_blind
            if is_blind:
                state = "paused: other workers ask the same servers, and not every server shows its load"
            else:
                state = "on again"
            log.info(
                "the trial of requests is %s", state, extra={"action": "trial_paused" if is_blind else "trial_goes_on"}
            )
        return is_blind

    def _leave(self, job_id: str) -> None:
        if self._assigned.pop(job_id, None) is not None:
            self.schedule.end(job_id, None, self._seen_at)

    def _facts(self, generation: Generation, assigned: _Assigned) -> RequestFacts | None:
        served, num_tokens = generation.served, generation.counts.num_tokens
        if served is None or num_tokens < 1 or served.num_texts > 1:
            return None
        if assigned.setting != DraftSetting(served.drafter, served.num_draft_tokens):
            return None
        if (load := served.load) is None or (self.num_peers() and not load.is_whole):
            return None
        if (num_rounds := self._num_rounds(served, num_tokens)) is None:
            return None
        decode_s, prompt_s = served.decode_s, served.prefill_s
        if decode_s is not None:
            num_rounds, num_tokens = num_rounds - 1, num_tokens - 1
        else:
            # Where the server reports no more than the text, everything from its sending to its end is decoding.
            decode_s = served.request_s - (served.queue_s or 0.0)
            prompt_s = None
        if (num_rounds and decode_s <= 0) or (not num_rounds and prompt_s is None):
            return None
        return RequestFacts(
            started_at=assigned.started_at,
            num_rounds=num_rounds,
            num_tokens=num_tokens,
            num_proposed=served.num_proposed,
            decode_s=decode_s,
            prompt_s=prompt_s,
            num_beside=load.num_beside,
            num_elsewhere=load.num_elsewhere,
            mean_context_tokens=generation.num_prompt_tokens + generation.counts.num_tokens / 2,
            expected=assigned.expected,
        )

    def _num_rounds(self, served: Served, num_tokens: int) -> int | None:
        """Passes of the target, or tokens at endpoints that never report passes; None: not known of this request."""
        if served.drafter is None:
            return num_tokens
        if served.num_rounds is not None:
            self._reports_rounds.add(served.endpoint)
            return served.num_rounds
        return None if served.endpoint in self._reports_rounds else num_tokens


@dataclass(eq=False)
class MeasuredSteering:
    """Hands on what servers measured of their own rounds.

    `revisions`: of the drafters that this worker knows, by name. `lengths`: None where the costs of rounds are known
    from requests only.
    """

    revisions: Mapping[str, str]
    lengths: LengthsTogether | None
    now: Callable[[], datetime]

    def begin(self, job_id: str, lane: LaneKey, decision: Decision, running: RunningJobs) -> DraftSetting:
        """As is best together with what runs: a step drafts as long as its longest request wants, and all pay for it.

        The server draws the arms of the experiment, of all its rounds.
        """
        if self.lengths is None or not _is_free(lane, decision):
            return decision.setting
        others = [RunningSequence(job.lane, job.decision) for job in running.by_id().values()]
        *_, setting = self.lengths.settings([*others, RunningSequence(lane, decision)], self.now())
        return setting if setting.num_draft_tokens else DraftSetting()

    def is_control(self, job_id: str) -> bool:
        """No request is control from its beginning to its end."""
        return False

    def steer(self, running: RunningJobs) -> None:
        """Nothing: a request stays as it was sent."""

    def observe(self, step: Step) -> Sequence[Slice]:
        """The slices that came with replies. Those of a drafter that another worker has there are left to it."""
        return [
            measured
            for generation in step.finished
            if generation.served is not None
            for measured in generation.served.slices
            if measured.treatment.drafter in self.revisions
        ]

    def close(self) -> Sequence[Slice]:
        """Nothing: the server goes on, and its next replies bring the rest."""
        return ()


Steering: TypeAlias = RoundSteering | RequestSteering | MeasuredSteering


def open_steering(
    base: Foundation,
    lengths: LengthsTogether,
    presence: Presence,
    validation: Validation,
    rivals: Callable[[], Mapping[str, DrafterState]],
) -> Steering:
    """What assigns the arms of the experiment. `rivals`: by drafter, the one that it is on trial with.

    It draws what is vanilla: slices of rounds, or requests where the engine cannot change those. Where a server drafts
    as each request asks, control requests would share their rounds with requests that draft, and be slowed by them:
    that server measures its own rounds, and nothing else is compared.
    """
    engine, share = base.engine, base.settings.policy.control_share
    if engine.can_redraft:
        schedule = RoundSchedule(RoundDesign(control_share=share), base.rng)
        return RoundSteering(
            schedule, lengths, base.now, lambda task: validation.tasks[task].num_vanilla_tokens, rivals
        )
    if isinstance(engine, AsksServers) and engine.measures_itself:
        revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
        return MeasuredSteering(revisions, lengths if engine.times_steps else None, base.now)
    endpoints = engine.endpoints if isinstance(engine, AsksServers) else tuple
    return RequestSteering(
        RequestSchedule(RequestDesign(control_share=share), base.rng),
        base.now,
        lambda: presence.num_peers,
        lambda: all(endpoint.is_whole_load_known for endpoint in endpoints()),
    )


@dataclass(frozen=True, slots=True)
class _Assigned:
    """A request on trial that runs."""

    setting: DraftSetting  #: that it was assigned to: the decision's, or vanilla
    started_at: datetime
    expected: Expected | None


def _is_free(lane: LaneKey, decision: Decision) -> bool:
    """Whether jobs of the lane with this decision may take part in the experiment."""
    return lane.purpose == Purpose.TRAFFIC.value and decision.was_free


def _subject_of(lane: LaneKey) -> str:
    return subject_of(lane.task, lane.sampling_bucket)


@dataclass(eq=False)
class SliceRecorder:
    """Called with slices, from the thread that writes in the background. Raises StoreError.

    `revisions` are those of the drafters, by name.
    """

    speedups: SwitchbackStore
    identity: EngineIdentity
    revisions: Mapping[str, str]
    _: KW_ONLY
    owner: str
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._tasks: set[str] = set()  # with slices since their speed-up was computed
        self._due = self.clock()

    def store(self, slices: Sequence[Slice]) -> None:
        """Store these, and refresh the speed-ups where that is due."""
        rows = [self._row(slice_) for slice_ in slices]
        self.speedups.add(rows)
        self._tasks |= {row.subject.task for row in rows}
        if self._tasks and self.clock() >= self._due:
            self.speedups.refresh(self.now(), self._tasks)
            self._tasks = set()
            self._due = self.clock() + REFRESH_EVERY_S

    def _row(self, counted: Slice) -> SliceRow:
        drafter, identity = counted.treatment.drafter, self.identity
        task, sampling_bucket = task_and_bucket(counted.task)
        subject = SpeedupSubject(
            task=task,
            sampling_bucket=sampling_bucket,
            target_revision=identity.target_revision,
            engine=identity.engine,
            host=identity.host,
            device=identity.device,
            drafter=drafter,
            draft_revision=self.revisions[drafter],
        )
        return SliceRow(subject, replace(counted, task=task), self.owner)


def open_slice_recorder(base: Foundation, revisions: Mapping[str, str]) -> SliceRecorder:
    """What stores the slices of this worker; `revisions` are those of its drafters, by name."""
    return SliceRecorder(
        SwitchbackStore(base.database), base.engine.identity, revisions, owner=base.owner, now=base.now
    )
