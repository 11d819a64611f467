"""What the database knows of jobs that a person asks for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ARRAY, Text, bindparam, cast, func, select

from alphaloop.store.database import Database
from alphaloop.tables import jobs


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
