"""Engines whose costs are stored: for these a decision can be explained without a worker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select

from alphaloop.store.database import Database
from alphaloop.tables import cost_profiles


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """A device of a host, the engine on it, and the target it served."""

    host: str
    device: str
    engine: str
    target_revision: str
    measured_at: datetime
    batches: tuple[int, ...]  #: batch sizes whose costs were measured


class EngineStore:
    """Reads the engines that workers have calibrated."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def first_measured(self, until: datetime) -> datetime | None:
        """When the newest pair of an engine and a target was calibrated first, of those before `until`."""
        costs = cost_profiles.c
        first = (
            select(func.min(costs.measured_at).label("at"))
            .where(costs.drafter == "", costs.measured_at <= until)
            .group_by(costs.engine, costs.target_revision)
            .subquery()
        )
        with self._database.begin() as connection:
            found: datetime | None = connection.execute(select(func.max(first.c.at))).scalar_one()
        return found

    def measured(self) -> list[MeasuredEngine]:
        """Every engine that was calibrated, the newest calibration first."""
        costs = cost_profiles.c
        key = (costs.host, costs.device, costs.engine, costs.target_revision)
        last = func.max(costs.measured_at)
        query = (
            select(*key, last, func.array_agg(costs.batch.distinct()))
            .where(costs.drafter == "")
            .group_by(*key)
            .order_by(last.desc(), *key)
        )
        with self._database.begin() as connection:
            return [
                MeasuredEngine(host, device, engine, target, at, tuple(sorted(batches)))
                for host, device, engine, target, at, batches in connection.execute(query)
            ]
