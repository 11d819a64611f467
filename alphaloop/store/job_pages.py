"""Jobs as a person looks through them: page by page, without their texts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, select, tuple_

from alphaloop.store.database import Database
from alphaloop.tables import jobs


@dataclass(frozen=True, slots=True)
class ListedJob:
    """The row of a job, without its payload and its outcome."""

    job_id: str
    task: str
    segment: str
    custom_id: str | None
    batch_id: str | None
    purpose: str
    status: str
    attempt: int
    num_crashes: int
    num_failures: int
    owner: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Place:
    """Behind which job a page begins: in the list of the newest."""

    created_at: datetime
    job_id: str


_COLUMNS: Final = tuple(jobs.c[field.name] for field in fields(ListedJob))


class JobPages:
    """Reads jobs. Every page is found by an index, and none is counted out."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest(self, limit: int, *, behind: Place | None = None) -> list[ListedJob]:
        """The jobs that were claimed first most recently, newest first."""
        query = select(*_COLUMNS).order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(limit)
        if behind is not None:
            # The first condition is the index's, the second one orders jobs of the same moment.
            query = query.where(
                jobs.c.created_at <= behind.created_at,
                tuple_(jobs.c.created_at, jobs.c.job_id) < tuple_(behind.created_at, behind.job_id),
            )
        with self._database.begin() as connection:
            return [_listed(row) for row in connection.execute(query)]

    def of_batch(self, batch_id: str, limit: int, *, behind: str = "") -> list[ListedJob]:
        """Claimed jobs of a batch whose job_id comes after `behind`, in the order of job_id."""
        # Materialized, or the planner may walk the primary key of all jobs for their order.
        batch = select(*_COLUMNS).where(jobs.c.batch_id == batch_id).cte("batch")
        query = select(batch).where(batch.c.job_id > behind).order_by(batch.c.job_id).limit(limit)
        with self._database.begin() as connection:
            return [_listed(row) for row in connection.execute(query)]

    def find(self, job_id: str) -> ListedJob | None:
        """The job of this id; None where no worker has claimed it."""
        with self._database.begin() as connection:
            row = connection.execute(select(*_COLUMNS).where(jobs.c.job_id == job_id)).first()
        return None if row is None else _listed(row)


def _listed(row: Row[Any]) -> ListedJob:
    return ListedJob(*tuple[Any, ...](row))
