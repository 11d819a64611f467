"""Sums by hour and by day: counts and times of runs, and counts of shadows, added to with every recorded job.

A fold of the ledger like acceptance_state: jobs that are recorded together are added up first. Days are summed from
hours. Evidence of a time before the ledger is estimated from hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
from alphaloop.deciding.evidence import SUMS, EvidenceSums
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.messages import Purpose
from alphaloop.store.database import Database
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
    hour_of = cache(_hour_of)  # jobs that ended together have one moment
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


class RollupStore:
    """Rebuilds days from hours; running it again gives the same rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
            start = datetime.combine(found.astimezone(UTC).date(), time(), UTC)
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
        with self._database.begin() as connection:
            return len(connection.execute(upsert).all())


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


#: Hours older than so many half-lives weigh less than half a percent.
NUM_HALF_LIVES: Final = 8


def evidence_of(hours: Sequence[EvidenceSums], half_life: timedelta) -> KeyEvidence:
    """The evidence of a key from its hours, earliest first."""
    left = float(NUM_RECENT)
    recent: list[EvidenceSums] = []
    older = EvidenceSums(hours[0].as_of)
    for hour in reversed(hours):
        taken = min(hour.jobs, left)
        left -= taken
        recent += list(_parts(hour, taken))
        if taken < hour.jobs:
            rest = _part(hour, (hour.jobs - taken) / hour.jobs)
            until = max(older.as_of, rest.as_of)
            older = older.faded(until, half_life) + rest.faded(until, half_life)
    evidence = KeyEvidence(older, EvidenceSums(older.as_of))
    for part in reversed(recent):
        evidence = evidence.with_job(part, half_life)
    return evidence


def sums_of_hour(row: Any, *, until: datetime) -> EvidenceSums:
    """The jobs of a row of acceptance_hourly, each with weight 1, as of mid-hour, or `until` if earlier."""
    rounds, is_own = row.rounds - row.num_jobs, row.mode != SHADOW
    k = max(row.num_draft_tokens, len(row.trials))
    chances = [float(c) for c in (rounds, *row.accepts)[:k]] if rounds else []
    # A job's chances are its rounds behind the prefill, then what it accepted at the position before.
    chances_w2 = [float(c) for c in (row.rounds_sq - 2 * row.rounds + row.num_jobs, *row.accepts_sq)[: len(chances)]]
    length = max(len(chances), len(row.trials))
    accepts, accepts_sq = _padded(row.accepts, length), _padded(row.accepts_sq, length)
    chances, chances_w2 = list(_padded(chances, length)), list(_padded(chances_w2, length))
    return EvidenceSums(
        as_of=min(row.bucket + _HOUR / 2, until),
        jobs=float(row.num_jobs),
        jobs_w2=float(row.num_jobs),
        rounds=float(rounds),
        offered=float(row.rounds - row.num_empty_rounds),
        tokens=float(row.num_tokens - row.num_jobs),
        # Each job has one row that is no shadow's: that one counts for its length.
        output_tokens=float(row.num_tokens) * is_own,
        output_tokens_sq=float(row.tokens_sq) * is_own,
        prompt_tokens=float(row.num_prompt_tokens) * is_own,
        texts=float(row.num_jobs) * is_own,
        ends=float(row.num_jobs - row.num_cut) * is_own,
        proposed=_padded(row.proposed, length),
        chances=tuple(chances),
        trials=_padded(row.trials, length),
        accepts=accepts,
        trials_w2=_padded(row.trials_sq, length),
        accepts_w2=accepts_sq,
        accepts_trials_w2=_padded(row.accepts_trials, length),
        chances_w2=tuple(chances_w2),
        accepts_chances_w2=tuple(map(_product, accepts, chances, accepts_sq, chances_w2)),
    )


#: Whose sums the rows of evidence are in; the others are in none.
_PURPOSES: Final = {CountSource.SHADOW: Purpose.TRAFFIC, CountSource.SCORED: Purpose.PROBE}
_HOURS: Final = RowSet(list(acceptance_hourly.c))
_SUMS: Final = ", ".join(
    f"{column.name} = array_add(standing.{column.name}, excluded.{column.name})"
    if isinstance(column.type, ARRAY)
    else f"{column.name} = standing.{column.name} + excluded.{column.name}"
    for column in acceptance_hourly.c
    if not column.primary_key
)


def _collation(column: Column[Any]) -> str:
    return ' COLLATE "C"' if isinstance(column.type, Text) else ""


#: A row's sums without any job; lists are replaced, never changed.
_NO_JOBS: Final[dict[str, Any]] = {
    column.name: [] if isinstance(column.type, ARRAY) else 0 for column in acceptance_hourly.c if not column.primary_key
}
#: Rows are locked in one order, whatever the collation of the database, so two workers that share hours never deadlock.
_ADD: Final = f"""
    INSERT INTO acceptance_hourly AS standing ({_HOURS.columns}) SELECT {_HOURS.given} FROM {_HOURS.source}
    ORDER BY {", ".join(f"given.{column.name}{_collation(column)}" for column in acceptance_hourly.primary_key)}
    ON CONFLICT ({", ".join(HOUR_KEY)}) DO UPDATE SET {_SUMS}
"""  # noqa: S608 - names of columns, no values


def _hour_of(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


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


_KEY: Final = tuple(c.name for c in acceptance_daily.primary_key.columns if c.name != "bucket")
_SUMMED: Final = tuple(c for c in acceptance_hourly.c if not c.primary_key)


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


#: The last jobs of a key are added a few at a time, by hour, so that older jobs leave the recent window.
NUM_RECENT, NUM_AT_ONCE = 96, 4
_HOUR: Final = timedelta(hours=1)


def _product(accepts: float, chances: float, accepts_sq: float, chances_sq: float) -> float:
    """Σ a·c over jobs, if accepts are proportional to chances; at most what the squares allow (Cauchy–Schwarz)."""
    return min(accepts / chances * chances_sq, math.sqrt(accepts_sq * chances_sq)) if chances else 0.0


def _parts(hour: EvidenceSums, num_jobs: float) -> Iterator[EvidenceSums]:
    while num_jobs > 0:
        yield _part(hour, min(NUM_AT_ONCE, num_jobs) / hour.jobs)
        num_jobs -= NUM_AT_ONCE


def _part(hour: EvidenceSums, share: float) -> EvidenceSums:
    """A share of the hour's jobs: sums of both orders are scaled by it, because single jobs are not known."""
    sums: dict[str, Any] = {}
    for name in SUMS:
        value = getattr(hour, name)
        sums[name] = tuple(v * share for v in value) if isinstance(value, tuple) else value * share
    return EvidenceSums(hour.as_of, **sums)


def _padded(values: Any, length: int) -> tuple[float, ...]:
    return (*map(float, values), *(0.0,) * (length - len(values)))
