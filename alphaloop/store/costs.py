"""Measured round times, kept so that a restarted worker knows its device and a screen can explain a decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, bindparam, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.costs import CostKind, CostPoint, CostTable, after_pause
from alphaloop.store.database import Store, of_row
from alphaloop.tables import cost_profiles

#: The target's own rows: no drafter, no revision.
_TARGET: Final = ("", "")
_MEASURED: Final = ("median_ms", "num_samples", "correction_variance")


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """A device of a host, the engine on it, and the target it served."""

    host: str
    device: str
    engine: str
    target_revision: str
    measured_at: datetime
    batches: tuple[int, ...]  #: batch sizes whose costs were measured


class CostSubject(NamedTuple):
    """What rows of the table are about: a target on an engine, and some drafters (name → revision)."""

    host: str
    device: str
    engine: str
    target_revision: str
    drafters: Mapping[str, str]

    @property
    def conditions(self) -> tuple[ColumnElement[bool], ...]:
        """The rows of the target and of these drafters."""
        costs, names = cost_profiles.c, ("host", "device", "engine", "target_revision")
        return (
            *(costs[name] == getattr(self, name) for name in names),
            tuple_(costs.drafter, costs.draft_revision).in_([_TARGET, *self.drafters.items()]),
        )

    def key(self, point: CostPoint) -> dict[str, object]:
        """The primary key of a point's row."""
        of_target = self._asdict()
        drafters = of_target.pop("drafters")
        revision = drafters[point.drafter] if point.drafter else ""
        shape = {name: getattr(point, name) for name in ("batch", "width", "context", "kind")}
        return {**of_target, "drafter": point.drafter or "", "draft_revision": revision, **shape}


class CostStore(Store):
    """The table of round times, by host, device, engine, target and drafter revisions."""

    def load(self, where: CostSubject) -> CostTable:
        """What was measured for the target and the drafters; empty if nothing was.

        Corrections are faded to now: since they were stored, those of drafters have moved towards the target's, and
        their variance has grown (alphaloop/costs.py).
        """
        costs = cost_profiles.c
        age_s = func.extract("epoch", func.now() - func.coalesce(costs.corrected_at, costs.measured_at)).label("age_s")
        rows = self._database.rows(select(cost_profiles, age_s).where(*where.conditions))
        ages_s: dict[str, float] = {}
        for row in rows:
            if row.drafter:
                ages_s[row.drafter] = min(float(row.age_s), ages_s.get(row.drafter, float("inf")))
        points = [of_row(CostPoint, row, drafter=row.drafter or None, kind=CostKind(row.kind)) for row in rows]
        return CostTable(after_pause(points, ages_s))

    def save(self, where: CostSubject, points: Iterable[CostPoint], *, replaces_all: bool = False) -> None:
        """Store measured points over those of the same shape, in place of their corrections.

        With `replaces_all`, in place of all that was measured for this target and these drafters.
        """
        with self._database.begin() as connection:
            if replaces_all:
                connection.execute(delete(cost_profiles).where(*where.conditions))
            rows = [
                where.key(point) | {name: getattr(point, name) for name in _MEASURED}
                for point in CostTable(points).points
            ]
            if rows:
                statement = insert(cost_profiles)
                anew = {"measured_at": func.now(), "correction": 1.0, "num_corrections": 0, "corrected_at": None}
                statement = statement.on_conflict_do_update(
                    index_elements=list(cost_profiles.primary_key),
                    set_={name: statement.excluded[name] for name in _MEASURED} | anew,
                )
                connection.execute(statement, rows)

    def save_corrections(self, where: CostSubject, points: Iterable[CostPoint]) -> None:
        """Store corrections from real rounds, as of now; skips points that were deleted or measured anew meanwhile."""
        corrected = ("correction", "num_corrections", "correction_variance")
        rows = [
            {f"at_{name}": value for name, value in (where.key(point) | {"median_ms": point.median_ms}).items()}
            | {name: getattr(point, name) for name in corrected}
            for point in CostTable(points).points
        ]
        if not rows:
            return
        names = [*(column.name for column in cost_profiles.primary_key), "median_ms"]
        statement = (
            update(cost_profiles)
            .where(*(cost_profiles.c[name] == bindparam(f"at_{name}") for name in names))
            .values(**{name: bindparam(name) for name in corrected}, corrected_at=func.now())
        )
        self._database.change(statement, rows)

    def first_measured(self, until: datetime) -> datetime | None:
        """When the newest pair of an engine and a target was calibrated first, of those before `until`."""
        costs = cost_profiles.c
        first = (
            select(func.min(costs.measured_at).label("at"))
            .where(costs.drafter == "", costs.measured_at <= until)
            .group_by(costs.engine, costs.target_revision)
            .subquery()
        )
        newest: datetime | None = self._database.scalar(select(func.max(first.c.at)))
        return newest

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
        return [
            MeasuredEngine(host, device, engine, target, at, tuple(sorted(batches)))
            for host, device, engine, target, at, batches in self._database.rows(query)
        ]
