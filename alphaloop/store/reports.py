"""The reports of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Integer, case, func, insert, select

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
        columns = (c for c in reports.c if c.name != "id")
        query = select(*columns).order_by(reports.c.created_at.desc(), reports.c.id.desc()).limit(1)
        with self._database.begin() as connection:
            row = connection.execute(query).mappings().first()
        return StoredReport(**row) if row else None

    def headings(self, limit: int) -> list[ReportHeading]:
        """The newest `limit` reports, the newest first."""
        query = (
            select(reports.c.created_at, reports.c.summary, _length("drift"), _length("incidents"))
            .order_by(reports.c.created_at.desc(), reports.c.id.desc())
            .limit(limit)
        )
        with self._database.begin() as connection:
            return [ReportHeading(*row) for row in connection.execute(query)]


def _length(name: str) -> ColumnElement[int]:
    """The length of an array of a report's data; 0 where the data have none."""
    part = reports.c.content[name]
    return case((func.jsonb_typeof(part) == "array", func.jsonb_array_length(part, type_=Integer)), else_=0)
