"""Jobs that have ended, with a text or without: outcomes go to the recorder, and the feed gets the places back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from alphaloop.errors import DecodeFailed
from alphaloop.messages import Failure, Status
from worker.blame import Blame
from worker.components import Components
from worker.engine import FailedRequest, Generation
from worker.jobs import outcomes
from worker.jobs.claiming import ClaimedJob, EndedUndecoded, cancelled
from worker.jobs.recording import EndedJob
from worker.jobs.running import RunningJob, Stepped


class EndedJobs:
    """Makes outcomes and passes them on. One thread uses it, the loop's."""

    def __init__(self, components: Components, blame: Blame) -> None:
        self._c = components
        self._blame = blame

    def cancelled(self, claimed: Sequence[ClaimedJob]) -> None:
        """Somebody asked to cancel these."""
        self._end([self._undecoded(one, Status.CANCELLED, cancelled()) for one in claimed])

    def expired(self, claimed: Sequence[ClaimedJob]) -> None:
        """The deadlines of these have passed."""
        self._end([self._undecoded(one, Status.EXPIRED, outcomes.expired(one)) for one in claimed])

    def found_ended(self, found: EndedUndecoded) -> None:
        """A claim found that this job must not be decoded any more."""
        self._end([self._undecoded(found.claimed, found.status, found.failure)])

    def failed(self, failed: Sequence[tuple[RunningJob, DecodeFailed]]) -> None:
        """The engine could not decode these. Those that are tried again have not ended."""
        self._end(self._failed_for_good(failed))

    def decoded(self, stepped: Stepped) -> int:
        """The jobs that ended in this step, or failed in it for good; returns how many."""
        for job, _ in stepped.finished:
            self._blame.worked(job.claimed.ready.prepared)
        now = self._c.now()
        ended = [self._succeeded(job, generation, now) for job, generation in stepped.finished]
        ended += self._failed_for_good(stepped.failed)
        ended += self._refused_for_good(stepped.refused)
        self._end(ended)
        return len(ended)

    def _failed_for_good(self, failed: Sequence[tuple[RunningJob, DecodeFailed]]) -> list[EndedJob]:
        blamed = self._blame.failed_for_good(failed)
        return [self._undecoded(job.claimed, Status.FAILED, failure) for job, failure in blamed]

    def _refused_for_good(self, refused: Sequence[tuple[RunningJob, FailedRequest]]) -> list[EndedJob]:
        blamed = self._blame.refused_for_good(refused)
        return [self._undecoded(job.claimed, Status.FAILED, failure) for job, failure in blamed]

    def _succeeded(self, job: RunningJob, generation: Generation, now: datetime) -> EndedJob:
        outcome = outcomes.succeeded(
            job.claimed,
            generation,
            job.recorded,
            self._c.engine.identity,
            queue_s=job.queue_s,
            now=now,
            decode_batch_id=job.decided_together,
        )
        return EndedJob(job.claimed, outcome)

    def _undecoded(self, claimed: ClaimedJob, status: Status, failure: Failure) -> EndedJob:
        return EndedJob(claimed, outcomes.ended(claimed, status, failure, now=self._c.now()))

    def _end(self, ended: Sequence[EndedJob]) -> None:
        if ended:
            self._c.recorder.put(ended)
            self._c.feed.ended([one.claimed.ready.lane for one in ended])
