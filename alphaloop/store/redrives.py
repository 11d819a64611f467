"""Which dead letters were sent again. A letter is named by its place and time, because offsets may begin again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from sqlalchemy import delete, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Database
from alphaloop.tables import redrives


class LetterKey(NamedTuple):
    """Where a dead letter lies, and its timestamp in milliseconds since 1970; 0 if it has none."""

    topic: str
    partition: int
    offset: int
    written_at_ms: int


_KEY = (redrives.c.topic, redrives.c.partition, redrives.c.offset, redrives.c.written_at_ms)


class RedriveStore:
    """The table of letters that were sent again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def mark(self, job_ids: Mapping[LetterKey, str]) -> None:
        """Note letters that the broker has, with the job each became."""
        if not job_ids:
            return
        rows = [{**key._asdict(), "job_id": job_id} for key, job_id in sorted(job_ids.items())]
        with self._database.begin() as connection:
            connection.execute(insert(redrives).on_conflict_do_nothing(), rows)

    def of(self, letters: Collection[LetterKey]) -> dict[LetterKey, str]:
        """Those of the letters that were sent again, with the job each became."""
        if not letters:
            return {}
        query = select(*_KEY, redrives.c.job_id).where(tuple_(*_KEY).in_([tuple(key) for key in letters]))
        with self._database.begin() as connection:
            return {LetterKey(*key): job_id for *key, job_id in connection.execute(query)}

    def among(self, job_ids: Collection[str]) -> frozenset[str]:
        """Those of the jobs that a letter became."""
        if not job_ids:
            return frozenset()
        query = select(redrives.c.job_id).where(redrives.c.job_id.in_(list(job_ids)))
        with self._database.begin() as connection:
            return frozenset(connection.execute(query).scalars())

    def forget_before(self, topic: str, partition: int, offset: int) -> None:
        """Forget the letters below an offset: they were deleted."""
        statement = delete(redrives).where(
            redrives.c.topic == topic, redrives.c.partition == partition, redrives.c.offset < offset
        )
        with self._database.begin() as connection:
            connection.execute(statement)
