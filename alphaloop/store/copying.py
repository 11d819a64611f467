"""Many rows by COPY: Postgres reads them in a third of the time of an INSERT, and writes them a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table

from alphaloop.store.exchange import driver_of


def copy_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, all with the same columns, in the caller's transaction; tuples and lists are arrays of numbers.

    Raises psycopg.Error, which `Database.begin` converts.
    """
    names = list(rows[0])
    written: dict[object, object] = {}  # rows that are recorded together repeat their moments

    def text_of(value: object) -> object:
        match value:
            case datetime() | UUID():
                if value not in written:
                    written[value] = str(value)
                return written[value]
            case tuple() | list():
                return f"{{{','.join(map(str, value))}}}" if value else "{}"
            case _:
                return value

    with (
        driver_of(connection).cursor() as cursor,
        cursor.copy(f"COPY {table.name} ({', '.join(names)}) FROM STDIN") as copy,
    ):
        for row in rows:
            copy.write_row([text_of(row[name]) for name in names])
