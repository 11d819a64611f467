"""Incidents: proofs that an engine did not do what it promises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.errors import AlphaloopError
from alphaloop.store.database import Store, of_row, values_of
from alphaloop.tables import incidents


class IncidentKind(StrEnum):
    """What is wrong."""

    WRONG_TEXT = "wrong_text"  #: a text differs from the vanilla one by more than a near-tie
    CUT_SHORT = "cut_short"  #: a text ended before its limit, and no reason was given
    WRONG_COUNTS = "wrong_counts"  #: the counts speak of another number of tokens than the text has


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident as it is found; vanilla has an empty drafter."""

    kind: IncidentKind
    task: str
    drafter: str
    draft_revision: str
    target_revision: str
    engine: str
    job_ids: tuple[str, ...]
    sentence: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """That somebody took note of an incident, and what they do about it."""

    by: str
    note: str
    at: datetime


@dataclass(frozen=True, slots=True)
class KnownIncident:
    """A stored incident. It is closed when later probes were right."""

    id: int
    found: Incident
    opened_at: datetime
    acknowledged: Acknowledgement | None = None
    closed_at: datetime | None = None


class NoSuchIncident(AlphaloopError, LookupError):
    """No open incident has this number."""


class IncidentStore(Store):
    """The table of incidents."""

    def open(self, found: Sequence[Incident], now: datetime) -> int:
        """Open incidents; returns how many are new. One that is open already gets the further jobs."""
        num_new = 0
        with self._database.begin() as connection:
            for one in found:
                statement = insert(incidents).values(**values_of(one), opened_at=now)
                again = statement.on_conflict_do_update(
                    index_elements=["kind", "task", "drafter", "draft_revision", "target_revision", "engine"],
                    index_where=incidents.c.closed_at.is_(None),
                    set_={"job_ids": func.array_cat(incidents.c.job_ids, statement.excluded.job_ids)},
                )
                opened_at = connection.execute(again.returning(incidents.c.opened_at)).scalar_one()
                num_new += opened_at == now
        return num_new

    def open_incidents(self) -> list[KnownIncident]:
        """Incidents that are not over, oldest first."""
        open_ones = select(incidents).where(incidents.c.closed_at.is_(None))
        return [_known(row) for row in self._database.rows(open_ones.order_by(incidents.c.opened_at, incidents.c.id))]

    def closed_since(self, moment: datetime) -> list[KnownIncident]:
        """Incidents that were closed after `moment`, oldest first."""
        query = select(incidents).where(incidents.c.closed_at > moment).order_by(incidents.c.closed_at, incidents.c.id)
        return [_known(row) for row in self._database.rows(query)]

    def acknowledge(self, incident_id: int, by: str, note: str, now: datetime) -> KnownIncident:
        """Record that somebody took note of an open incident; again replaces who and what. Raises NoSuchIncident."""
        statement = (
            update(incidents)
            .where(incidents.c.id == incident_id, incidents.c.closed_at.is_(None))
            .values(acknowledged_at=now, acknowledged_by=by, note=note)
            .returning(incidents)
        )
        row = self._database.row(statement)
        if row is None:
            raise NoSuchIncident(f"no open incident {incident_id}", hint="the console shows the open ones under Drift")
        return _known(row)

    def close(self, incident_ids: Collection[int], now: datetime) -> None:
        """Close incidents."""
        if incident_ids:
            statement = (
                update(incidents)
                .where(incidents.c.id.in_(incident_ids), incidents.c.closed_at.is_(None))
                .values(closed_at=func.greatest(now, incidents.c.opened_at))
            )
            self._database.change(statement)


def _known(row: Row[Any]) -> KnownIncident:
    by = Acknowledgement(row.acknowledged_by, row.note, row.acknowledged_at) if row.acknowledged_at else None
    return KnownIncident(row.id, incident_of(row), row.opened_at, by, row.closed_at)


def incident_of(row: Row[Any]) -> Incident:
    """What a row of the table says."""
    return of_row(Incident, row, kind=IncidentKind(row.kind))
