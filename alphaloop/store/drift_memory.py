"""What the drift test remembers between two runs, and the jobs that it has not read yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert as upsert

from alphaloop.errors import StoreBusy
from alphaloop.measurements import Stream, WatchedJob
from alphaloop.messages import Purpose
from alphaloop.store.database import Database
from alphaloop.store.hourly_sums import SHADOW
from alphaloop.store.settled_sums import sums_between
from alphaloop.tables import decode_runs, drift_memories, drift_positions

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_STREAM: Final = tuple(field.name for field in fields(Stream))


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the order in which jobs were decoded."""

    decoded_at: datetime
    ledger_id: int


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """A stream's memory as JSON."""

    version: int
    document: Mapping[str, Any]
    last_decoded_at: datetime
    norm_since: datetime | None = None  #: jobs decoded until then are not in it


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """Everything remembered of a task; `position` is None before its first job was read."""

    position: Position | None
    memories: Mapping[Stream, StoredMemory]


class DriftMemoryStore:
    """Reads new jobs and keeps what the test made of them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tasks(self, since: datetime, until: datetime) -> list[str]:
        """Tasks with traffic that was drafted in these hours, sorted."""
        with self._database.begin() as connection:
            sums = sums_between(connection, since - _HOUR, until).c
            query = select(sums.task).distinct().where(*_drafted(sums)).order_by(sums.task)
            return list(connection.execute(query).scalars())

    def jobs_a_month(self, now: datetime, month: timedelta) -> float:
        """Drafted jobs of traffic in the last month, of all tasks.

        A shorter history counts in proportion; a day is the shortest.
        """
        with self._database.begin() as connection:
            sums = sums_between(connection, now - month, now).c
            query = select(func.sum(sums.num_jobs), func.min(sums.bucket)).where(*_drafted(sums))
            num_jobs, first = connection.execute(query).one()
        if not num_jobs:
            return 0.0
        return float(num_jobs) * float(month / min(month, max(now - first, _DAY)))

    def page(self, task: str, after: Position, until: datetime, limit: int) -> list[WatchedJob]:
        """The oldest `limit` drafted jobs of traffic behind `after`, decoded until `until`, in their order."""
        runs = decode_runs.c
        query = (
            select(
                *(runs[name] for name in _STREAM), runs.segment, runs.decoded_at, runs.ledger_id,
                runs.num_draft_tokens, runs.trials, runs.accepts, runs.num_tokens,
            )
            .where(runs.task == task, runs.purpose == Purpose.TRAFFIC, runs.drafter != "")
            # The first condition follows from the second; partitions are left out by it.
            .where(runs.decoded_at >= after.decoded_at, runs.decoded_at <= until)
            .where(tuple_(runs.decoded_at, runs.ledger_id) > tuple_(after.decoded_at, after.ledger_id))
            .order_by(runs.decoded_at, runs.ledger_id)
            .limit(limit)
        )  # fmt: skip
        with self._database.begin() as connection:
            return [_job(row) for row in connection.execute(query)]

    def load(self, task: str) -> TaskMemory:
        """What the last run stored."""
        with self._database.begin() as connection:
            position = _position(connection, task)
            rows = connection.execute(select(drift_memories).where(drift_memories.c.task == task)).all()
        return TaskMemory(
            position,
            {
                Stream(*(getattr(row, name) for name in _STREAM)): StoredMemory(
                    row.version, row.document, row.last_decoded_at, row.norm_since
                )
                for row in rows
            },
        )

    def save(
        self, task: str, read_from: Position | None, position: Position, memories: Mapping[Stream, StoredMemory]
    ) -> None:
        """Store the memories and the position up to which they have read, together.

        `read_from` is the position that the run began from. Raises StoreBusy where another run has gone on from there
        meanwhile; nothing is stored then.
        """
        with self._database.begin() as connection:
            if not _move(connection, task, read_from, position):
                raise StoreBusy(f"drift test of task {task}: another run has read its jobs meanwhile")
            connection.execute(delete(drift_memories).where(drift_memories.c.task == task))
            rows = [asdict(stream) | _columns(its) for stream, its in memories.items()]
            connection.execute(insert(drift_memories), rows)

    def forget(self, before: datetime) -> None:
        """Delete the memories of streams that had no job since `before`."""
        with self._database.begin() as connection:
            connection.execute(delete(drift_memories).where(drift_memories.c.last_decoded_at < before))


def _drafted(sums: Any) -> tuple[Any, ...]:
    return sums.purpose == Purpose.TRAFFIC, sums.mode != SHADOW, sums.drafter != ""


def _move(connection: Connection, task: str, read_from: Position | None, to: Position) -> bool:
    """Whether the stored position was `read_from`, and is `to` now."""
    columns = drift_positions.c
    if read_from is None:
        made = upsert(drift_positions).values(task=task, **asdict(to)).on_conflict_do_nothing()
        return connection.execute(made.returning(columns.task)).first() is not None
    moved = (
        update(drift_positions)
        .where(
            columns.task == task, columns.decoded_at == read_from.decoded_at, columns.ledger_id == read_from.ledger_id
        )
        .values(**asdict(to))
    )
    return connection.execute(moved.returning(columns.task)).first() is not None


def _position(connection: Connection, task: str) -> Position | None:
    row = connection.execute(select(drift_positions).where(drift_positions.c.task == task)).first()
    return None if row is None else Position(row.decoded_at, row.ledger_id)


def _columns(memory: StoredMemory) -> dict[str, Any]:
    return {
        "version": memory.version,
        "document": dict(memory.document),
        "last_decoded_at": memory.last_decoded_at,
        "norm_since": memory.norm_since,
    }


def _job(row: Any) -> WatchedJob:
    return WatchedJob(
        stream=Stream(*(getattr(row, name) for name in _STREAM)),
        segment=row.segment,
        decoded_at=row.decoded_at,
        ledger_id=row.ledger_id,
        num_draft_tokens=row.num_draft_tokens,
        trials=tuple(row.trials),
        accepts=tuple(row.accepts),
        num_tokens=row.num_tokens,
    )
