"""Claims: which jobs this worker may decode, for how long, and how it gives them back.

A claim is a row of `jobs` with an owner, a lease and an attempt number, the fencing token. `Claiming` makes claims in
groups and gives them back. `LeaseKeeper` renews their leases until their outcomes are recorded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from alphaloop.errors import JobConflict, MalformedMessage, MessageError, StoreError, StoreValueRefused
from alphaloop.messages import Failure, Result, Status, carried_headers
from alphaloop.messages.codec import moment_of
from alphaloop.store.jobs import Claim, ClaimRequest, ClaimState, JobStore
from alphaloop.store.reuse import Reused
from worker.background import BackgroundThread, Retry
from worker.intake.validation import ReadyJob
from worker.sending import JobStream

if TYPE_CHECKING:
    from worker.foundation import Foundation

log = logging.getLogger(__name__)

#: Between two looks for leases to renew, and for cancellations whose notice was missed.
_CHECK_EVERY_S: Final = 1.0
#: How long a worker that ends waits for a database that is away. The leases of its jobs run out later.
RELEASE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that is ours until its lease runs out; `attempt` is the fencing token."""

    ready: ReadyJob
    attempt: int
    num_crashes: int = 0  #: earlier claims whose worker died or lost its lease
    num_failures: int = 0  #: times that the job itself failed and was to be tried again
    claimed_at_s: float = 0.0  #: seconds, on the clock of `Claiming`
    job_id: str = field(init=False, compare=False)  #: the job's
    stream: JobStream | None = field(init=False, compare=False)  #: of a job whose text is streamed

    def __post_init__(self) -> None:
        job = self.ready.job
        object.__setattr__(self, "job_id", job.job_id)
        stream = JobStream(job.job_id, self.attempt, self.carried) if job.body.stream else None
        object.__setattr__(self, "stream", stream)

    @property
    def carried(self) -> dict[str, str]:
        """The headers that the job's message hands on to its result and chunks."""
        return carried_headers(self.ready.delivery.record.headers)

    def waited_s(self, until: datetime) -> float:
        """Seconds from its message, by the broker's clock, to `until` (aware)."""
        timestamp_ms = self.ready.delivery.record.timestamp_ms
        return max(0.0, until.timestamp() - timestamp_ms / 1000) if timestamp_ms else 0.0


@dataclass(frozen=True, slots=True)
class EndedUndecoded:
    """A claimed job that ends without decoding."""

    claimed: ClaimedJob
    status: Status
    failure: Failure


@dataclass(frozen=True, slots=True)
class AnsweredEqual:
    """A claimed job that is answered with the recorded text of an equal one."""

    claimed: ClaimedJob
    source: Reused
    result: Result  #: the equal job's


@dataclass(slots=True)
class Claims:
    """A group of jobs, sorted by the answers to its claims."""

    to_decode: list[ClaimedJob] = field(default_factory=list)
    ended: list[EndedUndecoded] = field(default_factory=list)
    reused: list[AnsweredEqual] = field(default_factory=list)
    answered: list[tuple[ReadyJob, Claim]] = field(default_factory=list)  #: recorded before; emit that outcome again
    #: Known with another payload, or not storable.
    refused: list[tuple[ReadyJob, MessageError]] = field(default_factory=list)
    #: Claimed by another worker; ask again after these seconds.
    held: list[tuple[ReadyJob, float]] = field(default_factory=list)
    #: Not claimed, and how many workers died with each.
    suspects: list[tuple[ReadyJob, int]] = field(default_factory=list)

    @property
    def attempts(self) -> dict[str, int]:
        """The fencing token of every job that is ours."""
        return {claimed.job_id: claimed.attempt for claimed in self.ours}

    @property
    def ours(self) -> list[ClaimedJob]:
        """Every job that was claimed."""
        return [*self.to_decode, *self.undecoded]

    @property
    def undecoded(self) -> list[ClaimedJob]:
        """Those of them that end without being decoded."""
        return [*(ended.claimed for ended in self.ended), *(answered.claimed for answered in self.reused)]

    def end_expired(self, now: datetime) -> None:
        """Decode no job whose deadline has passed at `now` (aware)."""
        if over := [claimed for claimed in self.to_decode if claimed.ready.job.is_expired(now)]:
            self.to_decode = [claimed for claimed in self.to_decode if claimed not in over]
            self.ended += [EndedUndecoded(claimed, Status.EXPIRED, expired(claimed)) for claimed in over]


@dataclass(eq=False)
class Claiming:
    """Claims jobs for one worker and gives claims back; `leases` renews what is claimed."""

    store: JobStore
    leases: LeaseKeeper
    _: KW_ONLY
    owner: str
    lease_s: float
    max_attempts: int
    retry: Retry
    clock: Callable[[], float] = time.monotonic

    def claim(self, batch: Sequence[ReadyJob], *, alone: bool = True) -> Claims:
        """Claim a group in one transaction and hold it. A second delivery of one of its jobs is asked again later.

        `alone`: it is one job, and this worker has no other claim. Otherwise jobs with which a worker died stay
        unclaimed. A database that is away is waited for.
        """
        claims = Claims()
        first: dict[str, ReadyJob] = {}
        for ready in batch:
            if first.setdefault(ready.job.job_id, ready) is not ready:
                claims.held.append((ready, 0.0))
        self._claim(claims, list(first.values()), alone=alone)
        self.leases.hold(claims.attempts)
        return claims

    def claim_again(self, claimed: ClaimedJob) -> ClaimedJob | EndedUndecoded:
        """The claim with which a job is decoded again from its start, because a step with other jobs failed.

        It is the old claim, unless chunks of the job are out: then the job gets the next attempt, so that its readers
        can keep the two decodes apart. If another worker took the job meanwhile, the job ends here with an outcome that
        the store drops.
        """
        if claimed.stream is None or not claimed.stream.num_chunks:
            return claimed
        claims = self.claim([claimed.ready])
        ours: list[ClaimedJob | EndedUndecoded] = [*claims.to_decode, *claims.ended]
        lost = Failure(code="claim_lost", message="another worker has the job")
        return ours[0] if ours else EndedUndecoded(claimed, Status.FAILED, lost)

    def release(self, attempts: Mapping[str, int]) -> None:
        """Give back these claims, attempt by job_id; none counts as tried. Raises StoreError.

        What is not given back in time counts as a crash of this worker, so a database that is away is waited for a
        while, also in a hurry.
        """
        self.retry.for_a_while("release", partial(self.store.release, attempts, owner=self.owner), RELEASE_S)

    def _claim(self, claims: Claims, batch: Sequence[ReadyJob], *, alone: bool) -> None:
        """Claim these jobs together. A job that Postgres does not take, alone, is refused and stops no other."""
        ask = partial(
            self.store.claim,
            [_request(ready) for ready in batch],
            owner=self.owner,
            lease_s=self.lease_s,
            max_attempts=self.max_attempts,
            alone=alone,
        )
        try:
            answers = self.retry.until_done("claim", ask)
        except StoreValueRefused:
            if len(batch) == 1:
                claims.refused.append((batch[0], MalformedMessage("the database does not take the fields of this job")))
                return
            for ready in batch:
                self._claim(claims, [ready], alone=alone)
            return
        for ready, answer in zip(batch, answers, strict=True):
            self._sort(claims, ready, answer)

    def _sort(self, claims: Claims, ready: ReadyJob, answer: Claim) -> None:
        claimed = ClaimedJob(ready, answer.attempt, answer.num_crashes, answer.num_failures, self.clock())

        def end(status: Status, failure: Failure) -> None:
            claims.ended.append(EndedUndecoded(claimed, status, failure))

        match answer.state:
            case ClaimState.ENDED:
                claims.answered.append((ready, answer))
            case ClaimState.CONFLICT:
                hint = "give another job another job_id; the same payload again is answered from the record"
                claims.refused.append((ready, JobConflict(field="job_id", hint=hint)))
            case ClaimState.SUSPECT:
                claims.suspects.append((ready, answer.num_crashes))
            case ClaimState.HELD:
                claims.held.append((ready, answer.held_for_s or 0.0))
            case ClaimState.CANCELLED:
                end(Status.CANCELLED, cancelled())
            case ClaimState.EXHAUSTED:
                message = f"{answer.num_crashes} workers died with this job, all but the first while it ran alone"
                end(Status.FAILED, Failure(code="attempts_exhausted", message=message))
            case ClaimState.CLAIMED if ready.failure is not None:
                end(Status.FAILED, ready.failure)
            case ClaimState.CLAIMED:
                claims.to_decode.append(claimed)


def open_claiming(base: Foundation) -> Claiming:
    """What claims jobs for this worker. Its leases are left to run out while a thread of the worker hangs."""
    jobs, limits = JobStore(base.database), base.settings.worker
    leases = LeaseKeeper(jobs, owner=base.owner, lease_s=limits.lease_s, may_renew=lambda: base.liveness.hung() is None)
    return Claiming(
        jobs, leases, owner=base.owner, lease_s=limits.lease_s, max_attempts=limits.max_attempts, retry=base.retry
    )


def cancelled() -> Failure:
    """The failure in the result of a cancelled job."""
    return Failure(code="cancelled", message="cancelled on request")


def expired(claimed: ClaimedJob) -> Failure:
    """The failure in the result of a job that had not ended by its deadline."""
    return Failure(code="expired", message=f"not ended by its deadline, {claimed.ready.job.deadline}")


def _request(ready: ReadyJob) -> ClaimRequest:
    job = ready.job
    return ClaimRequest(
        job_id=job.job_id,
        payload_sha256=ready.payload_sha256,
        task=job.task,
        segment=job.segment or "",
        custom_id=job.custom_id,
        batch_id=job.batch_id,
        purpose=job.purpose.value,
        sent_at=moment_of(ready.delivery.record.timestamp_ms),
    )


@dataclass(eq=False)
class LeaseKeeper:
    """Renews each held claim when half of its lease is over, and knows which of the held jobs are cancelled.

    It has a `thread` of its own, because decoding may take longer than a lease. A job that ends within half a lease is
    never renewed, and no row is written more than twice a lease.

    The reader of `control` looks for cancellations (`check_cancelled`), and so does a notice of another worker's
    reader. If both are missed, they are found within a second.

    A claim that could not be renewed in time is lost: the attempt number fences it, so its outcome, if it still comes,
    is dropped by the store. Losing it is therefore only logged.

    While `may_renew` says no, claims are left to run out, so that another worker takes the jobs.

    `clock`: seconds, from any start.
    """

    store: JobStore
    _: KW_ONLY
    owner: str
    lease_s: float
    may_renew: Callable[[], bool] = lambda: True
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._held: dict[str, tuple[int, float]] = {}  # attempt, and when its lease began
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self.thread = BackgroundThread("leases", self._turn, every_s=min(self.lease_s / 8, _CHECK_EVERY_S))

    def hold(self, attempts: Mapping[str, int]) -> None:
        """Renew these claims from now on; job_id to attempt. They were made just now."""
        now = self.clock()
        with self._lock:
            self._held.update((job_id, (attempt, now)) for job_id, attempt in attempts.items())

    def let_go(self, job_ids: Iterable[str]) -> None:
        """Renew these no longer."""
        with self._lock:
            for job_id in job_ids:
                self._held.pop(job_id, None)
                self._cancelled.discard(job_id)

    def held(self) -> dict[str, int]:
        """Every claim of this worker, job_id to attempt, as far as it knows."""
        with self._lock:
            return {job_id: attempt for job_id, (attempt, _) in self._held.items()}

    def holds(self, job_id: str) -> bool:
        """Whether this worker has the claim, as far as it knows."""
        return job_id in self._held

    @property
    def num_held(self) -> int:
        """Claims of this worker whose outcome is not recorded."""
        return len(self._held)

    def cancelled(self) -> frozenset[str] | set[str]:
        """Held jobs whose cancellation was asked for."""
        if not self._cancelled:
            return frozenset()
        with self._lock:
            return set(self._cancelled)

    def check_cancelled(self) -> None:
        """Ask the database which held jobs are cancelled. Raises StoreError."""
        with self._lock:
            held = set(self._held)
        if not held:
            return
        cancelled = self.store.cancelled(held)
        with self._lock:
            self._cancelled |= cancelled & self._held.keys()

    def renew_due(self) -> None:
        """Renew the claims of which half of the lease is over.

        StoreError is logged: the next renewal, or the fencing token, settles it.
        """
        began = self.clock()
        with self._lock:
            due = {job_id: attempt for job_id, (attempt, at) in self._held.items() if began - at >= self.lease_s / 2}
        if not due or not self.may_renew():
            return
        try:
            still = self.store.renew(due, owner=self.owner, lease_s=self.lease_s)
        except StoreError as error:
            log.warning("leases not renewed: %s", error.message, extra={"action": "lease_renewal_failed"})
            return
        with self._lock:
            # A job that ended meanwhile cannot be renewed.
            asked = due.keys() & self._held.keys()
            self._held.update((job_id, (self._held[job_id][0], began)) for job_id in asked)
        if lost := asked - still:
            log.warning("%d leases lost", len(lost), extra={"action": "lease_lost"})

    def _turn(self) -> None:
        self.renew_due()
        try:
            self.check_cancelled()
        except StoreError as error:
            log.warning("cancellations not read: %s", error.message, extra={"action": "cancellations_not_read"})
