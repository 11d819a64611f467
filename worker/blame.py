"""Which of the jobs that failed have failed for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from alphaloop.errors import DecodeFailed
from alphaloop.messages import Failure
from worker.dead_letters import JobRetries
from worker.engine import Engine, FailedRequest, PreparedJob
from worker.jobs.lanes import LaneKey
from worker.jobs.self_test import SelfTest
from worker.outcomes import failure_of
from worker.running import RunningJob, RunningJobs


class Blame:
    """Asks the engine's self-test whether a job or the engine was at fault. One thread uses it, the loop's."""

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
        self._running = running
        self._retries = retries
        self._gone = gone
        self._now = now
        self._self_test = SelfTest(engine)

    def check(self) -> None:
        """Raise EngineSick when too many jobs in a row failed by the engine's fault."""
        self._self_test.check()

    def worked(self, prepared: PreparedJob) -> None:
        """The engine decoded this job to its end."""
        self._self_test.worked(prepared)

    def failed_for_good(self, failed: Sequence[tuple[RunningJob, DecodeFailed]]) -> list[tuple[RunningJob, Failure]]:
        """The jobs that failed alone, by their own fault and for good.

        Of the others, those that have a try left wait for it in Kafka. Where the engine was at fault, they run again.
        """
        blamed = []
        for job, error in failed:
            if not self._self_test.is_job_to_blame(job.job_id, job.setting):
                self._running.run_alone_later([job.claimed])
            elif not self._is_tried_again(job, failure := failure_of(error)):
                blamed.append((job, failure))
        return blamed

    def refused_for_good(self, refused: Sequence[tuple[RunningJob, FailedRequest]]) -> list[tuple[RunningJob, Failure]]:
        """The jobs that failed for good on a server; the others wait in Kafka for their next try."""
        blamed = []
        for job, failed in refused:
            failure = failure_of(failed.error)
            if failed.is_final or not self._is_tried_again(job, failure):
                blamed.append((job, failure))
        return blamed

    def _is_tried_again(self, job: RunningJob, failure: Failure) -> bool:
        if not self._retries.put(job.claimed, failure, self._now()):
            return False
        self._gone([job.lane])
        return True
