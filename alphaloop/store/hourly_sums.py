"""Sums by hour and by day: counts and times of runs, and counts of shadows, added to with every recorded job.

A fold of the ledger like acceptance_state: jobs that are recorded together are added up first. Days are summed from
hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from itertools import zip_longest
from typing import Any, Final

import psycopg
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    Select,
    Subquery,
    Table,
    Text,
    cast,
    func,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.messages import Purpose
from alphaloop.store.database import Store
from alphaloop.store.decode_runs import CountSource, JobCounts
from alphaloop.store.exchange import RowSet
from alphaloop.tables import acceptance_daily, acceptance_hourly

#: `mode` of sums that took no time; the other modes are those of alphaloop.messages.Mode.
SHADOW: Final = "shadow"
#: The key of a row.
HOUR_KEY: Final = tuple(column.name for column in acceptance_hourly.primary_key)


def add_to_hours(driver: psycopg.Connection, jobs: Sequence[JobCounts]) -> None:
    """Add these jobs to the rows of their hours, in the caller's transaction."""
    sums = sums_by_hour(jobs)
    if sums:
        driver.execute(_ADD, {"rows": RowSet.parameter(sums.values())})


def sums_by_hour(jobs: Iterable[JobCounts]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The jobs as rows of acceptance_hourly, by `HOUR_KEY`. A job counts once under each of its evidence keys."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    # Jobs that ended together have one moment.
    hour_of = cache(lambda moment: moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0))
    for job in jobs:
        if (run := job.run) is not None:
            row = _row(rows, run.key, hour_of(run.decoded_at), run.purpose, run.mode, run.num_draft_tokens)
            _add(row, run.counts, run.num_tokens, run.num_prompt_tokens)
            row["num_cut"] += run.is_cut
            row["wall_s"] += run.wall_s
            row["device_s"] += run.device_s
        for shadow in job.shadows:
            purpose = _PURPOSES.get(job.source(shadow))
            if purpose is not None:
                how = purpose.value, SHADOW, shadow.num_draft_tokens
                row = _row(rows, shadow.key, hour_of(shadow.decoded_at), *how)
                _add(row, shadow.counts, shadow.counts.num_tokens, shadow.num_prompt_tokens)
    return {tuple(row[name] for name in HOUR_KEY): row for row in rows.values()}


#: Hours change until so long after their day: jobs are recorded late, after midnight or after an outage.
_LATE: Final = timedelta(days=2)


class RollupStore(Store):
    """Rebuilds days from hours; running it again gives the same rows."""

    def roll_up(self, now: datetime) -> list[date]:
        """Sum up every day that has jobs beyond its sum, up to the day of `now`; returns those days, in order.

        Looked at are the days from `_LATE` before the last one that was summed up, so no day is left out, however long
        nobody called this.
        """
        days, hours = acceptance_daily.c, acceptance_hourly.c
        first = (
            select(func.coalesce(func.max(days.bucket) - _LATE, select(func.min(hours.bucket)).scalar_subquery()))
            .where(days.bucket <= now)
            .scalar_subquery()
        )
        with self._database.begin() as connection:
            found: datetime | None = connection.execute(select(first)).scalar_one()
            if found is None:
                return []
            start = _midnight(found)
            changed = _num_jobs(connection, acceptance_hourly, start, now)
            known = _num_jobs(connection, acceptance_daily, start, now)
        return [day for day in sorted(changed) if changed[day] != known.get(day) and self.roll_up_day(day)]

    def roll_up_day(self, day: date) -> int:
        """Sum the hours of a UTC day; returns the number of rows written. A day without hours is left as it is."""
        start = datetime.combine(day, time(), UTC)
        hours = acceptance_hourly.c
        keys = [hours[name] for name in _KEY]
        sums = [_sum(column).label(column.name) for column in _SUMMED]
        source = (
            select(type_coerce(start, acceptance_daily.c.bucket.type).label("bucket"), *keys, *sums)
            .where(hours.bucket >= start, hours.bucket < start + timedelta(days=1))
            .group_by(*keys)
        )
        names = ["bucket", *_KEY, *(column.name for column in _SUMMED)]
        statement = insert(acceptance_daily).from_select(names, source)
        upsert = statement.on_conflict_do_update(
            index_elements=list(acceptance_daily.primary_key.columns),
            set_={column.name: statement.excluded[column.name] for column in _SUMMED},
        ).returning(acceptance_daily.c.task)
        return len(self._database.rows(upsert))


def sums_between(connection: Connection, since: datetime, until: datetime) -> Subquery:
    """The sums of the hours that began in (since, until]; `bucket` is the start of the hour, or of the settled day.

    A day is settled when it was summed up `_LATE` or more after its end. A job that is recorded later than that is in
    no daily sum.
    """
    first = _midnight(since) + _DAY
    summed: datetime | None = connection.execute(select(func.max(acceptance_daily.c.bucket))).scalar_one()
    settled = first if summed is None else _midnight(summed - _LATE)
    end = max(first, min(settled, _midnight(until - _LAST_HOUR) + _DAY))
    days, hours = acceptance_daily.c.bucket, acceptance_hourly.c.bucket
    parts: list[Select[tuple[object, ...]]] = [
        select(acceptance_hourly).where(hours > since, hours < first, hours <= until),
        select(acceptance_daily).where(days >= first, days < end),
        select(acceptance_hourly).where(hours >= end, hours <= until),
    ]
    return union_all(*parts).subquery("sums")


#: Whose sums the rows of evidence are in; the others are in none.
_PURPOSES: Final = {CountSource.SHADOW: Purpose.TRAFFIC, CountSource.SCORED: Purpose.PROBE}
_HOURS: Final = RowSet(list(acceptance_hourly.c))
_KEY: Final = tuple(name for name in HOUR_KEY if name != "bucket")
_SUMMED: Final = tuple(column for column in acceptance_hourly.c if not column.primary_key)
_SUMS: Final = ", ".join(
    f"{column.name} = array_add(standing.{column.name}, excluded.{column.name})"
    if isinstance(column.type, ARRAY)
    else f"{column.name} = standing.{column.name} + excluded.{column.name}"
    for column in _SUMMED
)


def _collation(column: Column[Any]) -> str:
    return ' COLLATE "C"' if isinstance(column.type, Text) else ""


#: A row's sums without any job; lists are replaced, never changed.
_NO_JOBS: Final[dict[str, Any]] = {column.name: [] if isinstance(column.type, ARRAY) else 0 for column in _SUMMED}
#: Rows are locked in one order, whatever the collation of the database, so two workers that share hours never deadlock.
_ADD: Final = f"""
    INSERT INTO acceptance_hourly AS standing ({_HOURS.columns}) SELECT {_HOURS.given} FROM {_HOURS.source}
    ORDER BY {", ".join(f"given.{column.name}{_collation(column)}" for column in acceptance_hourly.primary_key)}
    ON CONFLICT ({", ".join(HOUR_KEY)}) DO UPDATE SET {_SUMS}
"""  # noqa: S608 - names of columns, no values


def _row(
    rows: dict[tuple[Any, ...], dict[str, Any]],
    key: EvidenceKey,
    bucket: datetime,
    purpose: str,
    mode: str,
    num_draft_tokens: int,
) -> dict[str, Any]:
    """The row to add a job to; without jobs if it is new."""
    place = (bucket, key, purpose, mode, num_draft_tokens)
    if place not in rows:
        how = {"bucket": bucket, "purpose": purpose, "mode": mode, "num_draft_tokens": num_draft_tokens}
        rows[place] = {**_NO_JOBS, **how, **key.columns}
    return rows[place]


def _add(row: dict[str, Any], counts: AcceptanceCounts, num_tokens: int, num_prompt_tokens: int) -> None:
    """Add one job. Sums of squares and products are those of single jobs."""
    row["num_jobs"] += 1
    row["rounds"] += counts.rounds
    row["num_empty_rounds"] += counts.num_empty_rounds
    row["num_cropped"] += counts.num_cropped
    row["num_prompt_tokens"] += num_prompt_tokens
    row["num_tokens"] += num_tokens
    row["rounds_sq"] += counts.rounds**2
    row["tokens_sq"] += num_tokens**2
    row["rounds_tokens"] += counts.rounds * num_tokens
    if not counts.proposed:
        return
    by_position: dict[str, Sequence[int]] = {
        "proposed": counts.proposed,
        "trials": counts.trials,
        "accepts": counts.accepts,
        "trials_sq": [trials**2 for trials in counts.trials],
        "accepts_sq": [accepts**2 for accepts in counts.accepts],
        "accepts_trials": [a * t for a, t in zip(counts.accepts, counts.trials, strict=True)],
    }
    for name, values in by_position.items():
        row[name] = [a + b for a, b in zip_longest(row[name], values, fillvalue=0)]


def _num_jobs(connection: Connection, sums: Table, since: datetime, until: datetime) -> dict[date, int]:
    """Jobs by UTC day. It only grows, so a day with as many jobs as in its sum has not changed since."""
    day = func.date_trunc("day", sums.c.bucket, "UTC")
    query = select(day, func.sum(sums.c.num_jobs)).where(sums.c.bucket >= since, sums.c.bucket <= until).group_by(day)
    return {start.astimezone(UTC).date(): int(number) for start, number in connection.execute(query)}


def _sum(column: Column[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, ARRAY):
        return func.sum_by_position(column, type_=column.type)
    return cast(func.sum(column), Double if isinstance(column.type, Double) else BigInteger)


_DAY: Final = timedelta(days=1)
_LAST_HOUR: Final = timedelta(hours=23)


def _midnight(at: datetime) -> datetime:
    return datetime.combine(at.astimezone(UTC).date(), time(), UTC)
