"""What the database knows of jobs that a person asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ARRAY, Text, bindparam, cast, func, select, text, tuple_

from alphaloop.store.database import Database
from alphaloop.tables import jobs

_PAGE: Final = 500


# The worker's row says which of its claims it decodes, and how far it is.
_CLAIMED: Final = text("""
    SELECT jobs.job_id, jobs.task, jobs.status, jobs.attempt, jobs.num_crashes, jobs.num_failures, jobs.owner,
        jobs.lease_expires_at, jobs.lease_expires_at > clock_timestamp() AS is_held, jobs.created_at, jobs.finished_at,
        jobs.outcome::text AS outcome, workers.num_tokens[array_position(workers.job_ids, jobs.job_id)] AS num_tokens,
        clock_timestamp() - workers.seen_at AS silence,
        EXISTS (SELECT FROM cancellations WHERE cancellations.job_id = jobs.job_id) AS is_cancelling
    FROM jobs LEFT JOIN workers ON workers.owner = jobs.owner
    WHERE jobs.job_id = ANY(:job_ids)
""")


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """Everything that the database tells of a job that a worker has claimed at least once.

    `num_tokens` and `silence` are what its worker said last, and how long ago: None where it did not say that it
    decodes the job.
    """

    job_id: str
    task: str
    status: str
    attempt: int
    num_crashes: int
    num_failures: int
    owner: str | None
    lease_expires_at: datetime | None
    is_held: bool | None  #: whether the lease is not over
    created_at: datetime
    finished_at: datetime | None
    outcome: str | None
    num_tokens: int | None
    silence: timedelta | None
    is_cancelling: bool


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job that a worker has claimed at least once. `outcome` is the recorded Result, None while the job runs."""

    job_id: str
    created_at: datetime
    outcome: bytes | None


def known_jobs(database: Database, job_ids: Collection[str]) -> dict[str, KnownJob]:
    """Those of the jobs that a worker has claimed, by job_id."""
    query = select(jobs.c.job_id, jobs.c.created_at, cast(jobs.c.outcome, Text)).where(
        jobs.c.job_id == func.any(bindparam("job_ids", list(job_ids), ARRAY(Text)))
    )
    with database.begin() as connection:
        return {
            job_id: KnownJob(job_id, created_at, None if outcome is None else outcome.encode())
            for job_id, created_at, outcome in connection.execute(query)
        }


def claimed_jobs(database: Database, job_ids: Collection[str]) -> dict[str, ClaimedJob]:
    """The same jobs with everything that is known of them, by job_id."""
    with database.begin() as connection:
        rows = connection.execute(_CLAIMED, {"job_ids": list(job_ids)}).mappings().all()
    return {row["job_id"]: ClaimedJob(**row) for row in rows}


def jobs_of_batch(database: Database, batch_id: str) -> list[str]:
    """Jobs of a batch that a worker has claimed."""
    query = select(jobs.c.job_id).where(jobs.c.batch_id == batch_id).order_by(jobs.c.created_at, jobs.c.job_id)
    with database.begin() as connection:
        return list(connection.execute(query).scalars())


def pages_of_batch(database: Database, batch_id: str) -> Iterator[list[tuple[str, str | None]]]:
    """job_id and custom_id of every job of a batch that a worker has claimed, in the order of their first claims.

    Read a page at a time.
    """
    last: tuple[datetime, str] | None = None
    while True:
        query = (
            select(jobs.c.job_id, jobs.c.custom_id, jobs.c.created_at)
            .where(jobs.c.batch_id == batch_id)
            .order_by(jobs.c.created_at, jobs.c.job_id)
            .limit(_PAGE)
        )
        if last is not None:
            query = query.where(tuple_(jobs.c.created_at, jobs.c.job_id) > last)
        with database.begin() as connection:
            page = connection.execute(query).all()
        if page:
            yield [(job_id, custom_id) for job_id, custom_id, _ in page]
            last = page[-1].created_at, page[-1].job_id
        if len(page) < _PAGE:
            return
