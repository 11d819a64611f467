"""Scheduled runs, each once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Database
from alphaloop.tables import schedule_runs


class ScheduleStore:
    """The runs that were due. A run inserts its row first, so that it happens once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, schedule_id: str, scheduled_for: datetime, owner: str, now: datetime) -> bool:
        """Take a run; False when somebody has or had it."""
        statement = (
            insert(schedule_runs)
            .values(schedule_id=schedule_id, scheduled_for=scheduled_for, owner=owner, started_at=now)
            .on_conflict_do_nothing()
            .returning(schedule_runs.c.id)
        )
        with self._database.begin() as connection:
            return connection.execute(statement).first() is not None

    def finish(self, schedule_id: str, scheduled_for: datetime, outcome: Mapping[str, Any], now: datetime) -> None:
        """Record that a run ended, with its counts or with `error`."""
        statement = (
            update(schedule_runs)
            .where(schedule_runs.c.schedule_id == schedule_id, schedule_runs.c.scheduled_for == scheduled_for)
            .values(finished_at=now, outcome=dict(outcome))
        )
        with self._database.begin() as connection:
            connection.execute(statement)

    def last_finished(self, schedule_id: str) -> tuple[datetime, Mapping[str, Any]] | None:
        """The newest run that ended: what it was due for, and its outcome."""
        query = (
            select(schedule_runs.c.scheduled_for, schedule_runs.c.outcome)
            .where(schedule_runs.c.schedule_id == schedule_id, schedule_runs.c.finished_at.is_not(None))
            .order_by(schedule_runs.c.scheduled_for.desc())
            .limit(1)
        )
        with self._database.begin() as connection:
            row = connection.execute(query).first()
        return (row.scheduled_for, row.outcome or {}) if row else None

    def newest(self) -> tuple[datetime, datetime | None, Mapping[str, Any]] | None:
        """Of the run that was started last, of any schedule: its start, its end, and its outcome so far."""
        runs = schedule_runs.c
        query = select(runs.started_at, runs.finished_at, runs.outcome).order_by(runs.id.desc()).limit(1)
        with self._database.begin() as connection:
            row = connection.execute(query).first()
        return (row.started_at, row.finished_at, row.outcome or {}) if row else None

    def succeeded(self, since: datetime, until: datetime) -> list[datetime]:
        """When the runs in [since, until] that ended without an error were started, of every schedule; oldest first."""
        runs = schedule_runs.c
        query = (
            select(runs.started_at)
            .where(runs.started_at >= since, runs.started_at <= until)
            .where(runs.finished_at.is_not(None), ~runs.outcome.has_key("error"))
            .order_by(runs.started_at)
        )
        with self._database.begin() as connection:
            return list(connection.execute(query).scalars())
