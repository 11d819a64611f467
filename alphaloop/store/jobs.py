"""Claims: who decodes a job, for how long, and what is already known about it.

A claim is (attempt, owner): the fencing token with which an outcome is recorded. A worker that lost the lease can go on
decoding, but cannot record the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ARRAY, Connection, Integer, Row, Text, bindparam, cast, collate, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Database
from alphaloop.store.notices import CANCELLATIONS
from alphaloop.store.row_set import RowSet
from alphaloop.tables import cancellations, jobs

_RUNNING: Final = "running"

_REQUESTS: Final = RowSet(
    [jobs.c[name] for name in ("job_id", "payload_sha256", "task", "segment", "custom_id", "batch_id", "purpose")]
)
#: The update changes nothing. Unlike DO NOTHING, it locks the existing row and returns it.
_CLAIM: Final = f"""
    INSERT INTO jobs ({_REQUESTS.columns}, status, attempt, owner, lease_expires_at)
    SELECT {_REQUESTS.given}, 'running', 1, %(owner)s, clock_timestamp() + make_interval(secs => %(lease_s)s)
    FROM {_REQUESTS.source} ORDER BY given.job_id COLLATE "C"
    ON CONFLICT (job_id) DO UPDATE SET attempt = jobs.attempt
    RETURNING job_id, payload_sha256, status, attempt, owner, CAST(outcome AS text) AS outcome,
        extract(epoch FROM lease_expires_at - clock_timestamp()) AS lease_s, xmax = 0 AS is_new
"""  # noqa: S608 - names of columns, no values


class ClaimState(StrEnum):
    """What a claim found."""

    CLAIMED = "claimed"  #: decode it
    ENDED = "ended"  #: the outcome is recorded: publish it again
    CONFLICT = "conflict"  #: known with another payload
    HELD = "held"  #: another worker has it: ask again when its lease is over
    CANCELLED = "cancelled"  #: claimed, to record that it was cancelled
    EXHAUSTED = "exhausted"  #: claimed, to record that it failed after too many attempts


#: States in which the caller holds the claim and owes an outcome.
CLAIMS: Final = frozenset({ClaimState.CLAIMED, ClaimState.CANCELLED, ClaimState.EXHAUSTED})


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A job that arrived."""

    job_id: str
    payload_sha256: bytes
    task: str
    segment: str | None
    custom_id: str | None
    batch_id: str | None
    purpose: str


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to one request. `outcome` is the recorded Result, byte for byte, when the job ended."""

    job_id: str
    state: ClaimState
    attempt: int
    outcome: bytes | None = None
    held_for_s: float | None = None


class JobStore:
    """The table of jobs. Every time is the database's own clock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, requests: Sequence[ClaimRequest], *, owner: str, lease_s: float, max_attempts: int) -> list[Claim]:
        """Claim jobs in one transaction; one answer a request, in order.

        A job named twice in one call is claimed once; the second answer is HELD for the length of the lease, or
        CONFLICT when its payload differs. `owner` must be new for each process: a running job of the same owner is
        claimed again, at the next attempt.
        """
        if not requests:
            return []
        with self._database.begin() as connection:
            found = _insert_or_lock(connection, requests, owner, lease_s)
            cancelled = _cancelled(connection, found)
            answers: list[Claim] = []
            mine: set[str] = set()
            for request in requests:
                answer = _answer(request, found[request.job_id], cancelled, owner, max_attempts)
                if answer.state in CLAIMS and request.job_id in mine:
                    answer = Claim(request.job_id, ClaimState.HELD, answer.attempt, held_for_s=lease_s)
                elif answer.state in CLAIMS:
                    mine.add(request.job_id)
                answers.append(answer)
            if known := [job_id for job_id in mine if not found[job_id].is_new]:
                connection.execute(
                    update(jobs)
                    .where(jobs.c.job_id == _any(known))
                    .values(attempt=jobs.c.attempt + 1, owner=owner, lease_expires_at=_lease_end(lease_s))
                )
        return answers

    def renew(self, attempts: Mapping[str, int], *, owner: str, lease_s: float) -> set[str]:
        """Extend the leases of claims (job_id → attempt); returns the jobs that this owner still holds."""
        if not attempts:
            return set()
        with self._database.begin() as connection:
            held = set(lock_held(connection, attempts.items(), owner))
            connection.execute(
                update(jobs).where(jobs.c.job_id == _any(held)).values(lease_expires_at=_lease_end(lease_s))
            )
        return held

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]:
        """Give jobs back that were not started, as if they had never been claimed; returns those that were held."""
        if not attempts:
            return set()
        with self._database.begin() as connection:
            held = set(lock_held(connection, attempts.items(), owner))
            connection.execute(delete(jobs).where(jobs.c.job_id == _any(held), jobs.c.attempt == 1))
            connection.execute(
                update(jobs)
                .where(jobs.c.job_id == _any(held))
                .values(attempt=jobs.c.attempt - 1, lease_expires_at=func.clock_timestamp())
            )
        return held

    def request_cancel(self, job_id: str) -> None:
        """Ask for a job's end, perhaps before the job is known, and tell every worker. An outcome is never changed."""
        with self._database.begin() as connection:
            connection.execute(insert(cancellations).values(job_id=job_id).on_conflict_do_nothing())
            connection.execute(select(func.pg_notify(CANCELLATIONS, "")))

    def cancelled(self, job_ids: Collection[str]) -> set[str]:
        """The jobs that a request asks to cancel."""
        if not job_ids:
            return set()
        with self._database.begin() as connection:
            return _cancelled(connection, job_ids)

    def outcomes(self, job_ids: Collection[str]) -> dict[str, bytes]:
        """The recorded Results of those jobs that ended, byte for byte."""
        if not job_ids:
            return {}
        query = select(jobs.c.job_id, cast(jobs.c.outcome, Text)).where(
            jobs.c.job_id == _any(job_ids), jobs.c.status != _RUNNING
        )
        with self._database.begin() as connection:
            return {job_id: outcome.encode() for job_id, outcome in connection.execute(query)}

    def progress(self, batch_id: str) -> dict[str, int]:
        """Jobs of a batch by status; only those that a worker has seen."""
        query = select(jobs.c.status, func.count()).where(jobs.c.batch_id == batch_id).group_by(jobs.c.status)
        with self._database.begin() as connection:
            return {status: number for status, number in connection.execute(query)}


def lock_held(connection: Connection, claims: Collection[tuple[str, int]], owner: str) -> dict[str, int]:
    """Lock the rows of those claims (job_id, attempt) that are still running and this owner's, and return them.

    Every statement here locks in order of job_id, so that two workers cannot deadlock. The order is that of Python's
    strings, whatever the database's collation.
    """
    claim = (
        func.unnest(
            bindparam("job_ids", [job_id for job_id, _ in claims], ARRAY(Text)),
            bindparam("attempts", [attempt for _, attempt in claims], ARRAY(Integer)),
        )
        .table_valued("job_id", "attempt")
        .render_derived(name="claim")
    )
    query = (
        select(jobs.c.job_id, jobs.c.attempt)
        .join(claim, (jobs.c.job_id == claim.c.job_id) & (jobs.c.attempt == claim.c.attempt))
        .where(jobs.c.owner == owner, jobs.c.status == _RUNNING)
        .order_by(collate(jobs.c.job_id, "C"))
        .with_for_update(of=jobs)
    )
    return {job_id: attempt for job_id, attempt in connection.execute(query)}


def _insert_or_lock(
    connection: Connection, requests: Sequence[ClaimRequest], owner: str, lease_s: float
) -> dict[str, Row[Any]]:
    """Insert and claim new rows, and lock existing ones, in Python's order of job_id."""
    first: dict[str, ClaimRequest] = {}
    for request in requests:
        first.setdefault(request.job_id, request)
    rows = RowSet.parameter(
        {
            "job_id": request.job_id,
            "payload_sha256": request.payload_sha256,
            "task": request.task,
            "segment": request.segment or "",
            "custom_id": request.custom_id,
            "batch_id": request.batch_id,
            "purpose": request.purpose,
        }
        for request in first.values()
    )
    found = connection.exec_driver_sql(_CLAIM, {"rows": rows, "owner": owner, "lease_s": lease_s})
    return {row.job_id: row for row in found}


def _answer(request: ClaimRequest, row: Row[Any], cancelled: set[str], owner: str, max_attempts: int) -> Claim:
    if row.payload_sha256 != request.payload_sha256:
        return Claim(request.job_id, ClaimState.CONFLICT, row.attempt)
    if row.status != _RUNNING:
        return Claim(request.job_id, ClaimState.ENDED, row.attempt, outcome=row.outcome.encode())
    if not row.is_new and row.owner not in (None, owner) and row.lease_s > 0:
        return Claim(request.job_id, ClaimState.HELD, row.attempt, held_for_s=float(row.lease_s))
    attempt = row.attempt if row.is_new else row.attempt + 1
    if request.job_id in cancelled:
        return Claim(request.job_id, ClaimState.CANCELLED, attempt)
    return Claim(request.job_id, ClaimState.CLAIMED if attempt <= max_attempts else ClaimState.EXHAUSTED, attempt)


def _cancelled(connection: Connection, job_ids: Collection[str]) -> set[str]:
    query = select(cancellations.c.job_id).where(cancellations.c.job_id == _any(job_ids))
    return set(connection.execute(query).scalars())


def _any(job_ids: Iterable[str]) -> Any:
    """One parameter for any number of ids, so that the statement is prepared once."""
    return func.any(bindparam(None, list(job_ids), ARRAY(Text)))


def _lease_end(lease_s: float) -> Any:
    return func.clock_timestamp() + timedelta(seconds=lease_s)
