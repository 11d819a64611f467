"""What the database knows of jobs that a person asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import ARRAY, Text, bindparam, cast, func, select

from alphaloop.store.database import Database
from alphaloop.tables import jobs

_PAGE: Final = 500


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


def recorded_outcomes(database: Database, batch_id: str) -> Iterator[tuple[str | None, bytes]]:
    """custom_id and Result of every ended job of a batch, in the order of job_id; read a page at a time."""
    last = ""
    while True:
        query = (
            select(jobs.c.job_id, jobs.c.custom_id, cast(jobs.c.outcome, Text))
            .where(jobs.c.batch_id == batch_id, jobs.c.status != "running", jobs.c.job_id > last)
            .order_by(jobs.c.job_id)
            .limit(_PAGE)
        )
        with database.begin() as connection:
            page = connection.execute(query).all()
        for job_id, custom_id, outcome in page:
            yield custom_id, outcome.encode()
            last = job_id
        if len(page) < _PAGE:
            return


def running_jobs(database: Database, batch_id: str) -> list[str]:
    """Jobs of a batch that a worker has claimed and that have not ended."""
    query = select(jobs.c.job_id).where(jobs.c.batch_id == batch_id, jobs.c.status == "running")
    with database.begin() as connection:
        return list(connection.execute(query).scalars())
