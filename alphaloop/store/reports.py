"""The reports of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Integer, Select, case, func, insert, select

from alphaloop.store.database import Database
from alphaloop.tables import reports


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report in all its forms; `content` is its data as JSON."""

    created_at: datetime
    covers_from: datetime
    covers_to: datetime
    summary: str
    content: Mapping[str, Any]
    text: str
    html: str


@dataclass(frozen=True, slots=True)
class ReportHeading:
    """What a list of reports says of one."""

    created_at: datetime
    summary: str
    num_flags: int  #: drift events that were open
    num_incidents: int  #: that were open


class ReportStore:
    """Every report that was made."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, report: StoredReport) -> None:
        """Keep a report."""
        statement = insert(reports).values(
            created_at=report.created_at,
            covers_from=report.covers_from,
            covers_to=report.covers_to,
            summary=report.summary,
            content=dict(report.content),
            text=report.text,
            html=report.html,
        )
        with self._database.begin() as connection:
            connection.execute(statement)

    def latest(self) -> StoredReport | None:
        """The newest report; None before the first."""
        return self._one(select(*_COLUMNS).order_by(reports.c.created_at.desc(), reports.c.id.desc()).limit(1))

    def made_at(self, created_at: datetime) -> StoredReport | None:
        """The report that was made at this moment."""
        query = select(*_COLUMNS).where(reports.c.created_at == created_at).order_by(reports.c.id.desc()).limit(1)
        return self._one(query)

    def headings(self, limit: int, *, before: datetime | None = None) -> list[ReportHeading]:
        """The newest `limit` reports, of those made before a moment, the newest first."""
        query = (
            select(reports.c.created_at, reports.c.summary, _length("drift"), _length("incidents"))
            .order_by(reports.c.created_at.desc(), reports.c.id.desc())
            .limit(limit)
        )
        if before is not None:
            query = query.where(reports.c.created_at < before)
        with self._database.begin() as connection:
            return [ReportHeading(*row) for row in connection.execute(query)]

    def _one(self, query: Select[Any]) -> StoredReport | None:
        with self._database.begin() as connection:
            row = connection.execute(query).mappings().first()
        return StoredReport(**row) if row else None


_COLUMNS: Final = tuple(column for column in reports.c if column.name != "id")


def _length(name: str) -> ColumnElement[int]:
    """The length of an array of a report's data; 0 where the data have none."""
    part = reports.c.content[name]
    return case((func.jsonb_typeof(part) == "array", func.jsonb_array_length(part, type_=Integer)), else_=0)
