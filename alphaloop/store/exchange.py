"""Fast statements for the hot path, straight to the driver: several in one exchange, many rows as one parameter, COPY.

SQLAlchemy takes 25 to 80 µs for a statement, and each answer that is waited for costs a change of threads twice. A
placeholder for each value would cost 60 µs a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, cast
from uuid import UUID

import psycopg
from sqlalchemy import Column, Connection, Table
from sqlalchemy.dialects import postgresql


def driver_of(connection: Connection) -> psycopg.Connection:
    """The driver's connection, in the same transaction. Raises psycopg.Error, which `Database.begin` converts."""
    return cast(psycopg.Connection, connection.connection.driver_connection)


@contextmanager
def one_exchange(connection: Connection) -> Iterator[psycopg.Connection]:
    """Statements of the block are sent together; their answers can be read behind the block.

    Each sees what those before it did. COPY is not possible here.
    """
    driver = driver_of(connection)
    with driver.pipeline():
        yield driver


_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]


class RowSet:
    """Many rows as one parameter, `rows`: `INSERT … SELECT … FROM json_to_recordset(…)` reads them as `given`.

    The text of such a statement does not depend on the number of rows, so the driver parses it once and Postgres
    prepares it once.
    """

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


NULL: Final = r"\N"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


def copy_lines(connection: Connection, table: Table, columns: Sequence[str], lines: Iterable[str]) -> None:
    """Insert rows with the values of `columns` by COPY, in the caller's transaction. Each line ends with a newline.

    Postgres reads them in a third of the time of an INSERT. The lines are made by the caller, not by the driver: what
    rows have in common is then written once for all of them, which halves the time again.

    Raises psycopg.Error, which `Database.begin` converts.
    """
    statement = f"COPY {table.name} ({', '.join(columns)}) FROM STDIN"
    with driver_of(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.write("".join(lines))


def fields_of(values: Iterable[str]) -> str:
    """Texts as neighbouring fields of a line."""
    return "\t".join([value.translate(_ESCAPES) for value in values])


def array_field(numbers: Sequence[int]) -> str:
    """An array of numbers as a field."""
    return f"{{{','.join(map(str, numbers))}}}" if numbers else "{}"
