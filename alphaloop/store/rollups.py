"""The daily sums, from the hourly sums that every outcome adds to."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from sqlalchemy import BigInteger, Column, ColumnElement, Double, cast, func, select, type_coerce
from sqlalchemy.dialects.postgresql import ARRAY, insert

from alphaloop.store.database import Database
from alphaloop.tables import acceptance_daily, acceptance_hourly

_KEY: Final = tuple(c.name for c in acceptance_daily.primary_key.columns if c.name != "bucket")
_SUMS: Final = tuple(c for c in acceptance_hourly.c if not c.primary_key)


class RollupStore:
    """Rebuilds days from hours; running it again gives the same rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def roll_up_day(self, day: date) -> int:
        """Sum the hours of a UTC day; returns the number of rows written. A day without hours is left as it is."""
        start = datetime.combine(day, time(), UTC)
        hours = acceptance_hourly.c
        keys = [hours[name] for name in _KEY]
        sums = [_sum(column).label(column.name) for column in _SUMS]
        source = (
            select(type_coerce(start, acceptance_daily.c.bucket.type).label("bucket"), *keys, *sums)
            .where(hours.bucket >= start, hours.bucket < start + timedelta(days=1))
            .group_by(*keys)
        )
        names = ["bucket", *_KEY, *(column.name for column in _SUMS)]
        statement = insert(acceptance_daily).from_select(names, source)
        upsert = statement.on_conflict_do_update(
            index_elements=list(acceptance_daily.primary_key.columns),
            set_={column.name: statement.excluded[column.name] for column in _SUMS},
        ).returning(acceptance_daily.c.task)
        with self._database.begin() as connection:
            return len(connection.execute(upsert).all())


def _sum(column: Column[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, ARRAY):
        return func.sum_by_position(column, type_=column.type)
    return cast(func.sum(column), Double if isinstance(column.type, Double) else BigInteger)
