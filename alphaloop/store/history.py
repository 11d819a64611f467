"""A task's traffic by the hourly sums: the length and the number of its jobs."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import func, select

from alphaloop.messages import Purpose
from alphaloop.store.database import Database
from alphaloop.store.hourly_sums import SHADOW
from alphaloop.tables import acceptance_hourly


class HistoryStore:
    """Reads the hourly sums, for figures that the evidence in acceptance_state does not hold."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def expected_tokens(self, task: str, *, now: datetime, window_days: float) -> float | None:
        """Mean tokens a job of the task's traffic; None without any."""
        hours = acceptance_hourly.c
        query = select(func.sum(hours.num_tokens), func.sum(hours.num_jobs)).where(
            hours.task == task,
            hours.bucket > now - timedelta(days=window_days),
            hours.bucket <= now,
            hours.purpose == Purpose.TRAFFIC,
            hours.mode != SHADOW,
        )
        with self._database.begin() as connection:
            total, num_jobs = connection.execute(query).one()
        return float(total / num_jobs) if num_jobs else None

    def num_jobs_since(self, task: str, sampling_bucket: str, moment: datetime) -> int:
        """Jobs of the task's traffic in the hours after that of `moment`."""
        hours = acceptance_hourly.c
        query = select(func.coalesce(func.sum(hours.num_jobs), 0)).where(
            hours.task == task,
            hours.sampling_bucket == sampling_bucket,
            hours.bucket > moment,
            hours.purpose == Purpose.TRAFFIC,
            hours.mode != SHADOW,
        )
        with self._database.begin() as connection:
            return int(connection.execute(query).scalar_one())

    def tasks(self) -> list[str]:
        """Every task that history knows."""
        with self._database.begin() as connection:
            return sorted(connection.execute(select(acceptance_hourly.c.task).distinct()).scalars())
