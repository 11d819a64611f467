"""Measured round times, kept so that a restarted worker knows its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sqlalchemy import func, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from alphaloop.cost import CostPoint, CostTable
from alphaloop.store.database import Database
from alphaloop.tables import cost_profiles

#: The target's own rows: no drafter, no revision.
_TARGET: Final = ("", "")


class CostStore:
    """The table of round times, by device, engine, target and drafter revisions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, device: str, engine: str, target_revision: str, drafters: Mapping[str, str]) -> CostTable:
        """What was measured for the target and for `drafters` (name → revision); empty if nothing was."""
        costs = cost_profiles.c
        query = select(costs.drafter, costs.batch, costs.width, costs.median_ms, costs.num_samples).where(
            costs.device == device,
            costs.engine == engine,
            costs.target_revision == target_revision,
            tuple_(costs.drafter, costs.draft_revision).in_([_TARGET, *drafters.items()]),
        )
        with self._database.begin() as connection:
            rows = connection.execute(query).all()
        return CostTable(
            CostPoint(row.drafter or None, row.batch, row.width, row.median_ms, row.num_samples) for row in rows
        )

    def save(
        self, device: str, engine: str, target_revision: str, drafters: Mapping[str, str], points: Iterable[CostPoint]
    ) -> None:
        """Store points over those of the same shape; `drafters` gives the revision of each drafter among them."""
        rows = [
            {
                "device": device,
                "engine": engine,
                "target_revision": target_revision,
                "drafter": point.drafter or "",
                "draft_revision": drafters[point.drafter] if point.drafter else "",
                "batch": point.batch,
                "width": point.width,
                "median_ms": point.median_ms,
                "num_samples": point.num_samples,
            }
            for point in sorted(points, key=lambda point: (point.drafter or "", point.batch, point.width))
        ]
        if not rows:
            return
        statement = insert(cost_profiles)
        statement = statement.on_conflict_do_update(
            index_elements=list(cost_profiles.primary_key),
            set_={
                "median_ms": statement.excluded.median_ms,
                "num_samples": statement.excluded.num_samples,
                "measured_at": func.now(),
            },
        )
        with self._database.begin() as connection:
            connection.execute(statement, rows)
