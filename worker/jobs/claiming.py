"""Claiming a group of jobs: which of them this worker decodes, and what happens to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alphaloop.errors import JobConflict, MalformedMessage, MessageError, StoreValueRefused
from alphaloop.messages import Failure, Status, carried_headers
from alphaloop.store.jobs import Claim, ClaimRequest, ClaimState, JobStore
from worker.intake.validation import ReadyJob
from worker.streams import JobStream


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that is ours until its lease runs out; `attempt` is the fencing token."""

    ready: ReadyJob
    attempt: int
    num_crashes: int = 0  #: earlier claims whose worker died or lost its lease
    num_failures: int = 0  #: times that the job itself failed and was to be tried again
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


@dataclass(frozen=True, slots=True)
class EndedUndecoded:
    """A claimed job that ends without decoding."""

    claimed: ClaimedJob
    status: Status
    failure: Failure


@dataclass(slots=True)
class Claims:
    """A group of jobs, sorted by the answers to its claims."""

    to_decode: list[ClaimedJob] = field(default_factory=list)
    ended: list[EndedUndecoded] = field(default_factory=list)
    answered: list[tuple[ReadyJob, Claim]] = field(default_factory=list)  #: recorded before; emit that outcome again
    refused: list[tuple[ReadyJob, MessageError]] = field(
        default_factory=list
    )  #: known with another payload, or not storable
    held: list[tuple[ReadyJob, float]] = field(
        default_factory=list
    )  #: another worker's; ask again after so many seconds
    suspects: list[tuple[ReadyJob, int]] = field(
        default_factory=list
    )  #: not claimed, and how many workers died with each

    @property
    def attempts(self) -> dict[str, int]:
        """The fencing token of every job that is ours."""
        return {c.job_id: c.attempt for c in (*self.to_decode, *(e.claimed for e in self.ended))}


class Claiming:
    """Claims groups of jobs for one worker."""

    def __init__(self, store: JobStore, *, owner: str, lease_s: float, max_attempts: int) -> None:
        self._store = store
        self._owner = owner
        self._lease_s = lease_s
        self._max_attempts = max_attempts

    def claim(self, batch: Sequence[ReadyJob], *, alone: bool = True) -> Claims:
        """Claim a group in one transaction. A second delivery of one of its jobs is asked again later.

        `alone`: it is one job, and this worker has no other claim. Otherwise jobs with which a worker died stay
        unclaimed.
        """
        claims = Claims()
        first: dict[str, ReadyJob] = {}
        for ready in batch:
            if first.setdefault(ready.job.job_id, ready) is not ready:
                claims.held.append((ready, 0.0))
        self._claim(claims, list(first.values()), alone=alone)
        return claims

    def _claim(self, claims: Claims, batch: Sequence[ReadyJob], *, alone: bool) -> None:
        """Claim these jobs together. A job that Postgres does not take, alone, is refused and stops no other."""
        try:
            answers = self._store.claim(
                [_request(ready) for ready in batch],
                owner=self._owner,
                lease_s=self._lease_s,
                max_attempts=self._max_attempts,
                alone=alone,
            )
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
        claimed = ClaimedJob(ready, answer.attempt, answer.num_crashes, answer.num_failures)
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
                claims.ended.append(EndedUndecoded(claimed, Status.CANCELLED, cancelled()))
            case ClaimState.EXHAUSTED:
                message = f"{answer.num_crashes} workers died with this job, all but the first while it ran alone"
                claims.ended.append(
                    EndedUndecoded(claimed, Status.FAILED, Failure(code="attempts_exhausted", message=message))
                )
            case ClaimState.CLAIMED if ready.failure is not None:
                claims.ended.append(EndedUndecoded(claimed, Status.FAILED, ready.failure))
            case ClaimState.CLAIMED:
                claims.to_decode.append(claimed)


def cancelled() -> Failure:
    """The failure in the result of a cancelled job."""
    return Failure(code="cancelled", message="cancelled on request")


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
    )
