"""Many rows by COPY: Postgres reads them in a third of the time of an INSERT, and writes them a page at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import ARRAY, Connection, DateTime, Table, Uuid

from alphaloop.store.exchange import driver_of


def copy_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows with all columns of the table, in the caller's transaction.

    Raises psycopg.Error, which `Database.begin` converts.
    """
    names = [column.name for column in table.c]
    # What psycopg would write in Python is written here: arrays of numbers, and moments and ids, which repeat.
    arrays = [column.name for column in table.c if isinstance(column.type, ARRAY)]
    repeated = [column.name for column in table.c if isinstance(column.type, DateTime | Uuid)]
    text_of, values_of = cache(str), itemgetter(*names)
    statement = f"COPY {table.name} ({', '.join(names)}) FROM STDIN"
    with driver_of(connection).cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            written = dict(row)
            for name in arrays:
                written[name] = _array(row[name])
            for name in repeated:
                written[name] = text_of(row[name])
            copy.write_row(values_of(written))


def _array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"
