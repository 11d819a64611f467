"""Daily copies of acceptance_state: where a fold of the ledger begins, so that it never reads more than about a day."""

from __future__ import annotations

from datetime import UTC, datetime, time
from typing import Final

from sqlalchemy import Connection, delete, exists, func, insert, select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import aliased

from alphaloop.acceptance import EvidenceKey
from alphaloop.store.acceptance_state import FoldedKey, folded_of, key_of
from alphaloop.store.database import Database
from alphaloop.tables import acceptance_checkpoints, acceptance_state
from alphaloop.tables.evidence import KEY

_COPIED: Final = (*KEY, "as_of", "num_jobs", "evidence", "last_ledger_id")


class CheckpointStore:
    """Takes and drops checkpoints. One process does this at a time: the scheduler that leads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, now: datetime) -> int:
        """Copy the rows that changed since their last copy; once in a UTC day. Returns how many."""
        state, copies = acceptance_state.c, acceptance_checkpoints.c
        start = datetime.combine(now.astimezone(UTC).date(), time(), UTC)
        known = select(func.coalesce(func.max(copies.last_ledger_id), -1)).where(
            *(copies[name] == state[name] for name in KEY)
        )
        # One moment for all rows, after the statement's snapshot: rows recorded later are not in the copies.
        moment = select(func.clock_timestamp()).scalar_subquery()
        source = select(moment, *(state[name] for name in _COPIED)).where(
            ~exists().where(copies.taken_at >= start), state.last_ledger_id > known.scalar_subquery()
        )
        copied = insert(acceptance_checkpoints).from_select(["taken_at", *_COPIED], source).returning(copies.task)
        with self._database.begin() as connection:
            return len(connection.execute(copied).all())

    def drop_before(self, at: datetime) -> int:
        """Delete copies that no fold up to a moment after `at` begins with; returns how many."""
        copies, newer, state = acceptance_checkpoints.c, aliased(acceptance_checkpoints).c, acceptance_state.c
        is_superseded = exists().where(
            *(newer[name] == copies[name] for name in KEY), newer.taken_at > copies.taken_at, newer.taken_at <= at
        )
        is_forgotten = ~exists().where(*(state[name] == copies[name] for name in KEY))
        with self._database.begin() as connection:
            return connection.execute(
                delete(acceptance_checkpoints).where(copies.taken_at < at, is_superseded | is_forgotten)
            ).rowcount


def newest_checkpoints(
    connection: Connection, until: datetime, subject: tuple[str, str]
) -> dict[EvidenceKey, FoldedKey]:
    """The last copy of each key taken by `until`. `subject`: a target revision and an engine."""
    copies = acceptance_checkpoints.c
    keys = [copies[name] for name in KEY]
    query = (
        select(acceptance_checkpoints)
        .ext(distinct_on(*keys))
        .where(copies.taken_at <= until, copies.target_revision == subject[0], copies.engine == subject[1])
        .order_by(*keys, copies.taken_at.desc())
    )
    return {key_of(row): folded_of(row) for row in connection.execute(query)}
