"""Many rows as one parameter of a statement: `INSERT … SELECT … FROM json_to_recordset(…)`.

The text of such a statement does not depend on the number of rows, so the driver parses it once and Postgres prepares
it once. A placeholder for each value would cost 60 µs a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Column
from sqlalchemy.dialects import postgresql

_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]


class RowSet:
    """Rows with these columns, under the name `given` in a statement; the parameter is called `rows`."""

    def __init__(self, columns: Sequence[Column[Any]]) -> None:
        self.names: Final = tuple(column.name for column in columns)
        types = ", ".join(f"{column.name} {column.type.compile(_DIALECT)}" for column in columns)
        self.source: Final = f"json_to_recordset(CAST(%(rows)s AS json)) AS given({types})"
        self.columns: Final = ", ".join(self.names)
        self.given: Final = ", ".join(f"given.{name}" for name in self.names)

    @staticmethod
    def parameter(rows: Iterable[Mapping[str, Any]]) -> str:
        """The rows as the statement takes them. Values are what the columns hold, in Python's types."""
        return json.dumps(list(rows), default=_as_json, ensure_ascii=False)


def _as_json(value: object) -> str:
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"no column holds {type(value).__name__}")
