"""A new claim for a job that this worker decodes again from its start, because a step with other jobs failed."""

from __future__ import annotations

from functools import partial

from alphaloop.messages import Failure, Status
from worker.jobs.claiming import ClaimedJob, Claiming, EndedUndecoded
from worker.jobs.leases import LeaseKeeper
from worker.retry import Retry


class DecodingAgain:
    """Gives a job whose chunks are out the next attempt, so that its readers can tell the two decodes apart."""

    def __init__(self, claiming: Claiming, leases: LeaseKeeper, retry: Retry) -> None:
        self._claiming = claiming
        self._leases = leases
        self._retry = retry

    def claim(self, claimed: ClaimedJob) -> ClaimedJob | EndedUndecoded:
        """The claim to decode with: this one, unless chunks of it are out.

        If another worker took the job meanwhile, the job ends here with an outcome that the store drops.
        """
        if claimed.stream is None or not claimed.stream.num_chunks:
            return claimed
        claims = self._retry.until_done("claim again", partial(self._claiming.claim, [claimed.ready]))
        for fresh in claims.to_decode:
            self._leases.hold({fresh.job_id: fresh.attempt})
            return fresh
        for ended in claims.ended:
            return ended
        return EndedUndecoded(claimed, Status.FAILED, Failure(code="claim_lost", message="another worker has the job"))
