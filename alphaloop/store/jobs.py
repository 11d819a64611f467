"""Claims: which worker decodes a job, for how long, and what is already known about it.

A claim is (attempt, owner): the fencing token with which an outcome is recorded. A worker that lost the lease can go on
decoding, but cannot record the outcome. The attempt only grows, also when a job is given back, so no two claims of a
job ever share one. Two other numbers bound how often a job is tried: `num_crashes` and `num_failures`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, Text, cast, collate, exists, extract, func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import CANCELLATIONS, Store, any_of, driver_of
from alphaloop.tables import cancellations, jobs

#: The status of a job without an outcome.
RUNNING: Final = "running"


class ClaimState(StrEnum):
    """What a claim found."""

    CLAIMED = "claimed"  #: decode it
    ENDED = "ended"  #: the outcome is recorded: publish it again
    CONFLICT = "conflict"  #: known with another payload
    HELD = "held"  #: another worker has it: ask again when its lease is over
    SUSPECT = "suspect"  #: a worker died with it: not claimed beside others, ask for it alone
    CANCELLED = "cancelled"  #: claimed, to record that it was cancelled
    EXHAUSTED = "exhausted"  #: claimed, to record that it failed because too many workers died with it


class ClaimRequest(NamedTuple):
    """A job that arrived. A tuple, because every job has one, and a frozen dataclass takes three times as long."""

    job_id: str
    payload_sha256: bytes
    task: str
    segment: str
    custom_id: str | None
    batch_id: str | None
    purpose: str
    sent_at: datetime | None = None  #: by the clock of Kafka; None where its message does not say so


class Claim(NamedTuple):
    """The answer to one request. `outcome` is the recorded Result, byte for byte, when the job ended.

    `headers` are those that the job's message handed on to that result. `num_crashes` and `num_failures` are known of
    jobs that are claimed, and of suspects.
    """

    job_id: str
    state: ClaimState
    attempt: int
    outcome: bytes | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    held_for_s: float | None = None
    num_crashes: int = 0  #: claims that ended without an outcome and were not given back
    num_failures: int = 0  #: times that the job itself failed and was to be tried again


class JobStore(Store):
    """The table of jobs. Every time is the database's own clock."""

    def claim(
        self, requests: Sequence[ClaimRequest], *, owner: str, lease_s: float, max_attempts: int, alone: bool = True
    ) -> list[Claim]:
        """Claim jobs, in one statement unless a job is asked for with two payloads; one answer a request, in order.

        A job named twice in one call is claimed once; the second answer is HELD for the length of the lease, or
        CONFLICT when its payload differs. `owner` must be new for each process: a running job of the same owner is
        claimed again, at the next attempt. A job with which a worker died is a SUSPECT, which no worker holds, unless
        it is asked for `alone`. When `max_attempts` more workers died with it alone, it is EXHAUSTED.
        """
        mine: dict[str, Claim] = {}
        chosen: dict[str, ClaimRequest] = {}
        waiting = list(requests)
        while waiting:
            asked: dict[str, ClaimRequest] = {}
            for request in waiting:
                asked.setdefault(request.job_id, request)
            claims = self._claim_each(asked.values(), owner, lease_s, max_attempts, alone=alone)
            mine |= claims
            chosen |= {job_id: asked[job_id] for job_id in claims}
            # A row may conflict with one request and be claimed by the next one of the same job.
            waiting = [
                request
                for request in waiting
                if request.job_id not in mine and request.payload_sha256 != asked[request.job_id].payload_sha256
            ]
        known = self._known({request.job_id for request in requests} - mine.keys())
        answers: list[Claim] = []
        for request in requests:
            job_id = request.job_id
            if job_id not in mine:
                answers.append(unclaimed(request, known.get(job_id)))
            elif request is chosen[job_id]:
                answers.append(mine[job_id])
            elif request.payload_sha256 != chosen[job_id].payload_sha256:
                answers.append(Claim(job_id, ClaimState.CONFLICT, mine[job_id].attempt))
            else:
                answers.append(Claim(job_id, ClaimState.HELD, mine[job_id].attempt, held_for_s=lease_s))
        return answers

    def _claim_each(
        self, requests: Collection[ClaimRequest], owner: str, lease_s: float, max_attempts: int, *, alone: bool
    ) -> dict[str, Claim]:
        """The answers of those that can be claimed now; one request a job."""
        by_column = zip(*requests, strict=True)
        columns = {name: list(values) for name, values in zip(ClaimRequest._fields, by_column, strict=True)}
        given = {"owner": owner, "lease_s": lease_s, "max_attempts": max_attempts, "alone": alone}
        sent_at = {request.job_id: request.sent_at for request in requests}
        with self._database.single() as connection:
            rows = driver_of(connection).execute(_CLAIM, columns | given)
            return {row[0]: claimed(sent_at[row[0]], *row, max_attempts=max_attempts) for row in rows}

    def _known(self, job_ids: Collection[str]) -> dict[str, Row[Any]]:
        """Rows that could not be claimed."""
        if not job_ids:
            return {}
        columns = jobs.c
        query = select(
            *(columns[name] for name in ("job_id", "payload_sha256", "status", "attempt", "headers")),
            cast(columns.outcome, Text).label("outcome"),
            extract("epoch", columns.lease_expires_at - func.clock_timestamp()).label("lease_s"),
        ).where(columns.job_id == any_of(job_ids))
        return {row.job_id: row for row in self._database.rows(query)}

    def renew(self, attempts: Mapping[str, int], *, owner: str, lease_s: float) -> set[str]:
        """Extend the leases of claims (job_id → attempt); returns the jobs that this owner still holds."""
        if not attempts:
            return set()
        given = {"job_id": list(attempts), "attempt": list(attempts.values()), "owner": owner, "lease_s": lease_s}
        with self._database.begin() as connection:
            driver = driver_of(connection)
            renewed: dict[str, bool] = dict(driver.execute(_RENEW, given).fetchall())
            if unknown := [job_id for job_id, is_unknown in renewed.items() if is_unknown]:
                driver.execute("DELETE FROM jobs WHERE job_id = ANY(%s)", [unknown])
        return renewed.keys() - unknown

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]:
        """Give claims back: none counts as a crash, and anyone may claim the jobs at once. Returns the jobs held.

        The attempt stays, so that nothing of this claim is taken for a later one's.
        """
        return self._give_back(attempts, owner, num_failures=0)

    def fail(self, attempts: Mapping[str, int], *, owner: str) -> set[str]:
        """Give claims back and count a failure of each job: it is to be tried again. Returns the jobs held."""
        return self._give_back(attempts, owner, num_failures=1)

    def _give_back(self, attempts: Mapping[str, int], owner: str, *, num_failures: int) -> set[str]:
        if not attempts:
            return set()
        with self._database.begin() as connection:
            held = _lock_held(connection, attempts, owner)
            connection.execute(
                update(jobs)
                .where(jobs.c.job_id == any_of(held))
                .values(
                    owner=None,
                    lease_expires_at=func.clock_timestamp(),
                    num_failures=jobs.c.num_failures + num_failures,
                )
            )
        return held

    def request_cancel(self, *job_ids: str, until: datetime | None = None) -> None:
        """Ask for the ends of what is sent as these jobs `until` then (24 h), and tell workers. No outcome changes."""
        if not job_ids:
            return
        with self._database.begin() as connection:
            asked = [{"job_id": job_id} | ({"ends_at": until} if until else {}) for job_id in sorted(job_ids)]
            given = insert(cancellations)
            later = {"ends_at": func.greatest(cancellations.c.ends_at, given.excluded.ends_at)}
            connection.execute(given.on_conflict_do_update(index_elements=["job_id"], set_=later), asked)
            connection.execute(select(func.pg_notify(CANCELLATIONS, "")))

    def cancelled(self, job_ids: Collection[str]) -> set[str]:
        """The jobs that a request asks to cancel."""
        if not job_ids:
            return set()
        is_later = (jobs.c.job_id == cancellations.c.job_id) & (jobs.c.created_at > cancellations.c.ends_at)
        is_asked = (cancellations.c.job_id == any_of(job_ids)) & ~exists().where(is_later)
        return set(self._database.scalars(select(cancellations.c.job_id).where(is_asked)))


#: Times are the statement's own, so that a claim made while others are waited for has its whole lease.
_LEASE_END: Final = "clock_timestamp() + make_interval(secs => %(lease_s)s)"
#: Workers that died with the job, the one that it is taken over from included.
_CRASHES: Final = "known.num_crashes + CASE WHEN known.owner <> excluded.owner THEN 1 ELSE 0 END"
#: A job with which a worker died is claimed alone. Beside others its crash is counted and no worker holds it, in this
#: same statement, because a worker that died before it gave such claims back would count as a crash of all of them.
_IS_SUSPECT: Final = f"""NOT %(alone)s AND known.owner IS DISTINCT FROM excluded.owner
    AND {_CRASHES} BETWEEN 1 AND %(max_attempts)s"""
#: One statement, so that a claim takes one exchange with the server. Locks rows in Python's order of job_id. A row that
#: may not be claimed is locked, left as it is, and not returned. A claim that is taken over from another owner counts
#: as a crash of that owner. A claim that was given back has no owner, and an owner asks for its own claim again when
#: the answer to its first request was lost, so neither of these counts.
_CLAIM: Final = f"""
    INSERT INTO jobs AS known (job_id, payload_sha256, task, segment, custom_id, batch_id, purpose, status, attempt,
        owner, lease_expires_at)
    SELECT given.*, 'running', 1, %(owner)s, {_LEASE_END}
    FROM unnest(%(job_id)b::text[], %(payload_sha256)b::bytea[], %(task)b::text[], %(segment)b::text[],
        %(custom_id)b::text[], %(batch_id)b::text[], %(purpose)b::text[]) AS given(job_id, s, t, l, c, b, p)
    ORDER BY given.job_id COLLATE "C"
    ON CONFLICT (job_id) DO UPDATE SET attempt = known.attempt + 1, num_crashes = {_CRASHES},
        owner = CASE WHEN {_IS_SUSPECT} THEN NULL ELSE excluded.owner END,
        lease_expires_at = CASE WHEN {_IS_SUSPECT} THEN clock_timestamp() ELSE excluded.lease_expires_at END
    WHERE known.status = 'running' AND known.payload_sha256 = excluded.payload_sha256
        AND (known.owner IS NULL OR known.owner = excluded.owner OR known.lease_expires_at <= clock_timestamp())
    RETURNING job_id, attempt, num_crashes, num_failures,
        (SELECT ends_at FROM cancellations WHERE cancellations.job_id = known.job_id), owner IS NULL
"""  # noqa: S608 - no values
#: An INSERT for the same reason as that of alphaloop.store.outcomes: its plan depends on no statistics. A row that was
#: not there is inserted without a payload, and deleted again by the caller.
_RENEW: Final = f"""
    INSERT INTO jobs AS held (job_id, payload_sha256, task, purpose, status, attempt, owner, lease_expires_at)
    SELECT given.job_id, '', '', '', 'running', given.attempt, %(owner)s, {_LEASE_END}
    FROM unnest(%(job_id)b::text[], %(attempt)b::int[]) AS given(job_id, attempt)
    ORDER BY given.job_id COLLATE "C"
    ON CONFLICT (job_id) DO UPDATE SET lease_expires_at = excluded.lease_expires_at
    WHERE held.status = 'running' AND held.attempt = excluded.attempt AND held.owner = excluded.owner
    RETURNING job_id, payload_sha256 = '' AS is_unknown
"""  # noqa: S608 - no values


def _lock_held(connection: Connection, attempts: Mapping[str, int], owner: str) -> set[str]:
    """Lock the rows of those claims (job_id → attempt) that are still running and this owner's; returns their job_ids.

    Every statement here locks in order of job_id, so that two workers cannot deadlock. The order is that of Python's
    strings, whatever the database's collation. Attempts are compared here, because with a join the planner may choose
    to read the whole table.
    """
    query = (
        select(jobs.c.job_id, jobs.c.attempt)
        .where(jobs.c.job_id == any_of(attempts), jobs.c.owner == owner, jobs.c.status == RUNNING)
        .order_by(collate(jobs.c.job_id, "C"))
        .with_for_update()
    )
    return {job_id for job_id, attempt in connection.execute(query) if attempts[job_id] == attempt}


def claimed(
    sent_at: datetime | None,
    job_id: str,
    attempt: int,
    num_crashes: int,
    num_failures: int,
    cancelled_until: datetime | None,
    is_suspect: bool,
    *,
    max_attempts: int,
) -> Claim:
    """The answer to a request whose job was claimed, or left to be claimed alone."""
    # Any job that the worker of the first crash held may have caused that one.
    state = ClaimState.CLAIMED if num_crashes <= max_attempts else ClaimState.EXHAUSTED
    if cancelled_until is not None and (sent_at is None or sent_at <= cancelled_until):
        state = ClaimState.CANCELLED
    if is_suspect:
        state = ClaimState.SUSPECT
    return Claim(job_id, state, attempt, num_crashes=num_crashes, num_failures=num_failures)


def unclaimed(request: ClaimRequest, row: Row[Any] | None) -> Claim:
    """The answer to a request whose job could not be claimed; `row` is what is known of the job."""
    if row is None:  # retention deleted it after the claim had found it
        return Claim(request.job_id, ClaimState.HELD, 0, held_for_s=0.0)
    if row.payload_sha256 != request.payload_sha256:
        return Claim(request.job_id, ClaimState.CONFLICT, row.attempt)
    if row.status != RUNNING:
        return Claim(
            request.job_id, ClaimState.ENDED, row.attempt, outcome=row.outcome.encode(), headers=row.headers or {}
        )
    return Claim(request.job_id, ClaimState.HELD, row.attempt, held_for_s=max(0.0, float(row.lease_s)))
