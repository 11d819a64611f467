"""The reports of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select

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
