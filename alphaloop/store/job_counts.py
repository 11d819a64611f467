"""The counts of jobs: of a job's own run and of other drafters on its text, and sums by hour and by day.

Sums hold counts and times of runs, and counts of shadows. They are a fold of the ledger like acceptance_state: jobs
that are recorded together are added up first. Days are summed from hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import cache
from itertools import zip_longest
from typing import Any, Final
from uuid import UUID, uuid4

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

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey, ProposerCounts
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.messages import Purpose
from alphaloop.store.database import RowSet, Store
from alphaloop.tables import acceptance_daily, acceptance_hourly

#: `mode` of sums that took no time; the other modes are those of alphaloop.messages.Mode.
SHADOW: Final = "shadow"
#: SQL of a row of decode_runs: its rounds that could draft, which are those after the prefill of each of its texts.
ROUNDS: Final = "greatest(rounds - num_texts, 0)"
#: The same of those in which a drafter was asked for a token. Without `chances`, k never changed.
DRAFTED_ROUNDS: Final = f"""
    CASE WHEN mode = 'vanilla' THEN 0 WHEN cardinality(chances) > 0 THEN least(chances[1], {ROUNDS}) ELSE {ROUNDS} END
"""
#: The key of a row.
HOUR_KEY: Final = tuple(column.name for column in acceptance_hourly.primary_key)


class CountSource(StrEnum):
    """How a row of evidence_rows was counted."""

    SHADOW = "shadow"  #: scored on a text that others decoded
    SCORED = "scored"  #: on the text of a control, which asked for it: a probe without decoding
    SHARED_WEIGHTS = "shared_weights"  #: in the rounds of a drafter of the same weights
    DRAFTED = "drafted"  #: of a drafter that decoded: of its rounds alone, or scored at its longest drafts


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """How a job was decoded and what it took; times in seconds, `decoded_at` aware."""

    key: EvidenceKey
    purpose: str
    mode: str
    num_draft_tokens: int
    reason: str
    device: str
    counts: AcceptanceCounts
    num_prompt_tokens: int
    num_tokens: int
    batch_size: int
    queue_s: float
    time_to_first_token_s: float | None
    wall_s: float
    device_s: float
    decoded_at: datetime
    #: By position, rounds that allowed it: k may change within a job. Empty: k never changed.
    chances: tuple[int, ...] = ()
    #: The same for jobs that were decided together; a job that was decided alone has its own.
    decode_batch_id: UUID = field(default_factory=uuid4)
    #: Whether the counts are those of the rounds. If not, a server did not tell, and they say only how many tokens the
    #: text has.
    is_counted: bool = True
    is_cut: bool = False  #: whether a limit ended the text
    num_texts: int = 1  #: each with a prefill
    proposers: tuple[ProposerCounts, ...] = ()  #: as a generation's
    target: str = ""  #: name of what decoded it
    batch_id: str | None = None  #: the batch of its job

    @property
    def evidence(self) -> EvidenceSums:
        """What the run adds to the evidence of its key."""
        return EvidenceSums.of_job(
            self.counts,
            self.num_draft_tokens,
            self.decoded_at,
            self.num_tokens,
            self.num_prompt_tokens,
            self.chances or None,
            is_cut=self.is_cut,
        )

    @property
    def is_evidence(self) -> bool:
        """Whether it is evidence. Controls are not: they repeat a probe's prompt without a draft."""
        return self.is_counted and self.purpose != Purpose.CONTROL


@dataclass(frozen=True, slots=True)
class ShadowRun:
    """Counts of a drafter on a text that it did not decode, under its own key.

    They are evidence of acceptance like a run's (docs/concepts/drafters.md says why), but not of time.
    """

    key: EvidenceKey
    num_draft_tokens: int
    counts: AcceptanceCounts  #: of the text's beginning, where it is long
    num_prompt_tokens: int
    num_output_tokens: int  #: of the whole text, without forced ones
    decoded_at: datetime
    chances: tuple[int, ...] = ()  #: as a run's; empty: `num_draft_tokens` was allowed in every round
    is_drafted: bool = False  #: of rounds that the drafter had in the job itself
    is_whole: bool = True  #: whether the counts are of whole rounds over the whole text
    #: Whether a limit ended the text, of the one row that counts for the job's length; None: another row does.
    is_cut: bool | None = None

    @property
    def evidence(self) -> EvidenceSums:
        """What it adds to the evidence of its key."""
        sums = EvidenceSums.of_job(
            self.counts,
            self.num_draft_tokens,
            self.decoded_at,
            self.counts.num_tokens,
            self.num_prompt_tokens,
            self.chances or None,
        )
        if self.is_cut is None:
            return replace(sums, output_tokens=0.0, prompt_tokens=0.0, texts=0.0, ends=0.0)
        return replace(sums, output_tokens=float(self.num_output_tokens), ends=0.0 if self.is_cut else 1.0)


@dataclass(frozen=True, slots=True)
class JobCounts:
    """All counts of a job; empty if it was not decoded."""

    job_id: str
    attempt: int
    run: DecodeRun | None = None
    shadows: tuple[ShadowRun, ...] = ()  #: of drafters that did not decode it as far as they could, each at most once

    def __post_init__(self) -> None:
        """A job's length counts once: in its run, else in the first of its shadows; that of a control never."""
        run = self.run
        if self.shadows and run is not None and run.purpose != Purpose.CONTROL and not self.is_run_evidence:
            first = replace(self.shadows[0], is_cut=run.is_cut)
            object.__setattr__(self, "shadows", (first, *self.shadows[1:]))

    @property
    def is_run_evidence(self) -> bool:
        """Whether the run's own counts are evidence: not a control's, nor those that a longer score includes."""
        run = self.run
        return run is not None and run.is_evidence and all(shadow.key != run.key for shadow in self.shadows)

    @property
    def evidence(self) -> list[tuple[EvidenceKey, EvidenceSums]]:
        """What the job adds to the evidence, by key: its run first, then its shadows."""
        shadows = [(shadow.key, shadow.evidence) for shadow in self.shadows]
        if self.run is not None and self.is_run_evidence:
            return [(self.run.key, self.run.evidence), *shadows]
        return shadows

    def source(self, shadow: ShadowRun) -> CountSource:
        """How one of `shadows` was counted."""
        if self.run is not None and self.run.purpose == Purpose.CONTROL:
            return CountSource.SCORED
        if shadow.is_drafted or (self.run is not None and shadow.key == self.run.key):
            return CountSource.DRAFTED
        return CountSource.SHADOW if shadow.is_whole else CountSource.SHARED_WEIGHTS


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
        ago this was called last.
        """
        days, hours = acceptance_daily.c, acceptance_hourly.c
        first = (
            select(func.coalesce(func.max(days.bucket) - _LATE, select(func.min(hours.bucket)).scalar_subquery()))
            .where(days.bucket <= now)
            .scalar_subquery()
        )
        with self._database.begin() as connection:
            oldest: datetime | None = connection.execute(select(first)).scalar_one()
            if oldest is None:
                return []
            start = _midnight(oldest)
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
    row["num_forced"] += counts.num_forced
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
