"""Writes what decisions were taken from; alphaloop.store.past_decisions reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Column, Text

from alphaloop.store.database import Database
from alphaloop.store.exchange import RowSet
from alphaloop.store.housekeeping import ensure_days, utc_day
from alphaloop.tables import decision_inputs, decision_records


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of decision_inputs; `content` is JSON."""

    used_at: datetime
    number: int
    kind: str
    content: str


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A row of decision_records; `inputs` and `outcome` are JSON."""

    decided_at: datetime
    decision_id: UUID
    task: str
    sampling_bucket: str
    num_running: int
    num_jobs: int
    inputs: str
    outcome: str


class DecisionRecordStore:
    """Writes records. Writing the same rows again changes nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, session_id: UUID, inputs: Sequence[InputRow], records: Sequence[RecordRow]) -> None:
        """Write rows of one session in one transaction. A missing partition is made first."""
        with self._database.begin() as connection:
            ensure_days(connection, {utc_day(row.used_at) for row in inputs} | {utc_day(r.decided_at) for r in records})
            for statement, rows in ((_INSERT_INPUTS, inputs), (_INSERT_RECORDS, records)):
                if rows:
                    given = [{"session_id": session_id, **_values(row)} for row in rows]
                    connection.exec_driver_sql(statement, {"rows": RowSet.parameter(given)})


def _values(row: InputRow | RecordRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _insert(table: str, columns: Sequence[Column[Any]], json_columns: Sequence[str]) -> str:
    """Documents travel as text: as part of the parameter's own JSON they would be written twice."""
    given = RowSet([Column(column.name, Text) if column.name in json_columns else column for column in columns])
    values = ", ".join(
        f"CAST(given.{name} AS json)" if name in json_columns else f"given.{name}" for name in given.names
    )
    return f"INSERT INTO {table} ({given.columns}) SELECT {values} FROM {given.source} ON CONFLICT DO NOTHING"  # noqa: S608


_INSERT_INPUTS: Final = _insert("decision_inputs", list(decision_inputs.c), ["content"])
_INSERT_RECORDS: Final = _insert("decision_records", list(decision_records.c), ["inputs", "outcome"])
