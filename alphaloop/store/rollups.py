"""The daily sums, from the hourly sums that every outcome adds to."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from sqlalchemy import BigInteger, Column, ColumnElement, Connection, Double, Table, cast, func, select, type_coerce
from sqlalchemy.dialects.postgresql import ARRAY, insert

from alphaloop.store.database import Database
from alphaloop.tables import acceptance_daily, acceptance_hourly

#: Hours change until so long after their day: jobs are recorded late, after midnight or after an outage.
LATE: Final = timedelta(days=2)
_KEY: Final = tuple(c.name for c in acceptance_daily.primary_key.columns if c.name != "bucket")
_SUMS: Final = tuple(c for c in acceptance_hourly.c if not c.primary_key)


class RollupStore:
    """Rebuilds days from hours; running it again gives the same rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def roll_up(self, now: datetime) -> list[date]:
        """Sum up every day that has jobs beyond its sum, up to the day of `now`; returns those days, in order.

        Looked at are the days from `LATE` before the last one that was summed up, so no day is left out, however long
        nobody called this.
        """
        days, hours = acceptance_daily.c, acceptance_hourly.c
        first = (
            select(func.coalesce(func.max(days.bucket) - LATE, select(func.min(hours.bucket)).scalar_subquery()))
            .where(days.bucket <= now)
            .scalar_subquery()
        )
        with self._database.begin() as connection:
            found: datetime | None = connection.execute(select(first)).scalar_one()
            if found is None:
                return []
            start = datetime.combine(found.astimezone(UTC).date(), time(), UTC)
            changed = _num_jobs(connection, acceptance_hourly, start, now)
            known = _num_jobs(connection, acceptance_daily, start, now)
        return [day for day in sorted(changed) if changed[day] != known.get(day) and self.roll_up_day(day)]

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


def _num_jobs(connection: Connection, sums: Table, since: datetime, until: datetime) -> dict[date, int]:
    """Jobs by UTC day. It only grows, so a day with as many jobs as in its sum has not changed since."""
    day = func.date_trunc("day", sums.c.bucket, "UTC")
    query = select(day, func.sum(sums.c.num_jobs)).where(sums.c.bucket >= since, sums.c.bucket <= until).group_by(day)
    return {start.astimezone(UTC).date(): int(number) for start, number in connection.execute(query)}


def _sum(column: Column[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, ARRAY):
        return func.sum_by_position(column, type_=column.type)
    return cast(func.sum(column), Double if isinstance(column.type, Double) else BigInteger)
