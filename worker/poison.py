"""Poison jobs: which job brought a worker or a step down, and how it is kept from doing so again.

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
against the job. Requests that kill inference servers are judged by worker/servers/health.py.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from alphaloop.deciding.policy import Decision, DraftSetting, Reason
from alphaloop.errors import DecodeFailed, EngineSick, reason_of
from alphaloop.liveness import beat
from alphaloop.messages import Body, Failure, Job, Mode, Purpose
from worker import outcomes
from worker.claims import Claims, LeaseKeeper
from worker.dead_letters import JobRetries
from worker.engine import Engine, FailedRequest, PreparedJob, Sampling
from worker.intake.validation import ReadyJob
from worker.lanes import LaneKey
from worker.running import RunningJob, RunningJobs

log = logging.getLogger(__name__)

#: So many failed jobs in a row, each followed by a failed test, and the engine is sick.
MOST_IN_A_ROW: Final = 3
#: Output of a test: enough rounds that a drafter drafts too.
NUM_TOKENS: Final = 16
_NAME: Final = "self-test"
_PROMPT: Final = "one two three four one two three four one two"


class Suspects:
    """Jobs with which a worker died, until this worker has no other claim. One thread owns it, the feed's."""

    def __init__(
        self, leases: LeaseKeeper, rng: random.Random, *, delay_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._leases = leases
        self._rng = rng
        self._delay_s = delay_s
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
            due = self._since + (self._delay_s * 2.0 ** (num_alone - 1) if num_alone else 0.0)
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


class Blame:
    """Which of the jobs that failed have failed for good. One thread uses it, the loop's.

    After a job failed alone, the engine decodes the beginning of the last job that succeeded here, or a fixed prompt
    before the first one, in the same way. If this test passes, the failure was the job's. If the test fails too,
    nothing is said against the job, and it is tried again.
    """

    def __init__(
        self,
        engine: Engine,
        running: RunningJobs,
        retries: JobRetries,
        *,
        gone: Callable[[Sequence[LaneKey]], object],
        now: Callable[[], datetime],
    ) -> None:
        """`gone` is called with the lanes of jobs that wait in Kafka for their next try."""
        self._engine = engine
        self._running = running
        self._retries = retries
        self._gone = gone
        self._now = now
        self._job = Job(job_id=_NAME, task=_NAME, body=Body(prompt=_PROMPT), purpose=Purpose.CONTROL)
        self._known = engine.prepare(self._job, Sampling(max_tokens=NUM_TOKENS, temperature=0.0))
        self._num_failed_in_a_row = 0
        self._error = ""

    def check(self) -> None:
        """Raise EngineSick when MOST_IN_A_ROW jobs failed, and the test after each of them, without a success."""
        if self._num_failed_in_a_row >= MOST_IN_A_ROW:
            num_jobs = self._num_failed_in_a_row
            raise EngineSick(
                f"{num_jobs} jobs in a row failed, and after each of them the self-test: {self._error}",
                hint="see docs/guides/operate.md, a worker ended with code 3",
            )

    def worked(self, prepared: PreparedJob) -> None:
        """The engine decoded this job to its end."""
        self._known = prepared
        self._num_failed_in_a_row = 0

    def failed_for_good(self, failed: Sequence[tuple[RunningJob, DecodeFailed]]) -> list[tuple[RunningJob, Failure]]:
        """The jobs that failed alone, by their own fault and for good.

        Of the others, those that have a try left wait for it in Kafka. Where the engine was at fault, they run again.
        """
        blamed = []
        for job, error in failed:
            if not self.is_job_to_blame(job.job_id, job.setting):
                self._running.run_alone_later([job.claimed])
            elif not self._is_tried_again(job, failure := outcomes.failure_of(error)):
                blamed.append((job, failure))
        return blamed

    def refused_for_good(self, refused: Sequence[tuple[RunningJob, FailedRequest]]) -> list[tuple[RunningJob, Failure]]:
        """The jobs that failed for good on a server; the others wait in Kafka for their next try."""
        blamed = []
        for job, failed in refused:
            failure = outcomes.failure_of(failed.error)
            if failed.is_final or not self._is_tried_again(job, failure):
                blamed.append((job, failure))
        return blamed

    def is_job_to_blame(self, job_id: str, setting: DraftSetting) -> bool:
        """Test the engine, which is empty, because this job failed alone while it drafted as `setting` says.

        True: the failure is the job's. False: the engine failed the test too, so the job is to be tried again.
        """
        error = self._test(setting)
        if error is None:
            self._num_failed_in_a_row = 0
            return True
        self._num_failed_in_a_row += 1
        self._error = error
        extra = {"action": "self_test_failed", "job_id": job_id, "num_in_a_row": self._num_failed_in_a_row}
        log.error("a job failed, and then the self-test: %s", error, extra=extra)
        return False

    def _is_tried_again(self, job: RunningJob, failure: Failure) -> bool:
        if not self._retries.put(job.claimed, failure, self._now()):
            return False
        self._gone([job.lane])
        return True

    def _test(self, setting: DraftSetting) -> str | None:
        """What went wrong in a test of the engine; None when its text came to its end."""
        mode = Mode.SPECULATIVE if setting.num_draft_tokens else Mode.VANILLA
        decision = Decision(mode, setting.drafter, None, setting.num_draft_tokens, Reason.CONTROL, "self-test")
        sampling = replace(self._known.sampling, max_tokens=min(NUM_TOKENS, self._known.sampling.max_tokens))
        try:
            self._engine.abandon()
            self._engine.admit(PreparedJob(self._job, self._known.token_ids, sampling), decision)
            while self._engine.load().num_running:
                beat()
                self._engine.step()
        except Exception as error:
            return reason_of(error)
        return None
