"""Sums of acceptance over a long time from few rows: one a day where the day is settled, else one an hour."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Final

from sqlalchemy import Connection, Select, Subquery, func, select, union_all

from alphaloop.store.rollups import LATE
from alphaloop.tables import acceptance_daily, acceptance_hourly

_DAY: Final = timedelta(days=1)
_LAST_HOUR: Final = timedelta(hours=23)


def sums_between(connection: Connection, since: datetime, until: datetime) -> Subquery:
    """The sums of the hours that began in (since, until]; `bucket` is the start of the hour, or of the settled day.

    A day is settled when it was summed up `LATE` or more after its end. A job that is recorded later than that is in no
    daily sum.
    """
    first = _midnight(since) + _DAY
    summed: datetime | None = connection.execute(select(func.max(acceptance_daily.c.bucket))).scalar_one()
    settled = first if summed is None else _midnight(summed - LATE)
    end = max(first, min(settled, _midnight(until - _LAST_HOUR) + _DAY))
    days, hours = acceptance_daily.c.bucket, acceptance_hourly.c.bucket
    parts: list[Select[tuple[object, ...]]] = [
        select(acceptance_hourly).where(hours > since, hours < first, hours <= until),
        select(acceptance_daily).where(days >= first, days < end),
        select(acceptance_hourly).where(hours >= end, hours <= until),
    ]
    return union_all(*parts).subquery("sums")


def _midnight(at: datetime) -> datetime:
    return datetime.combine(at.astimezone(UTC).date(), time(), UTC)
