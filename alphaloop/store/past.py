"""Evidence at an earlier moment: exact as far back as the ledger reaches, estimated from hours before that."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Double,
    Interval,
    Row,
    Select,
    Table,
    cast,
    func,
    literal,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.messages import Purpose
from alphaloop.store.acceptance_state import key_of
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import CountSource, DecodeRun, ShadowRun
from alphaloop.store.hours import NUM_HALF_LIVES, evidence_of, sums_of_hour
from alphaloop.store.ledger import LONGEST_WAIT, LedgerStore, counts_of, shadow_of
from alphaloop.tables import acceptance_hourly, decode_runs, evidence_rows

_KEY: Final = EvidenceKey.__slots__
_RUN: Final = tuple(name for name in DecodeRun.__slots__ if name not in ("key", "counts", "chances", "is_counted"))
_SUMS: Final = tuple(column for column in acceptance_hourly.c if not column.primary_key)
#: A day's jobs count as of its middle; hours count as of theirs.
_MIDDLE_OF_DAY: Final = timedelta(hours=11, minutes=30)


@dataclass(slots=True)
class Recorded:
    """What one transaction recorded."""

    runs: list[DecodeRun] = field(default_factory=list)
    evidence: list[tuple[EvidenceKey, EvidenceSums]] = field(default_factory=list)  #: as it was added together
    scored: list[EvidenceKey] = field(default_factory=list)  #: of drafters that were counted on traffic, undecoded

    def add_run(self, run: DecodeRun, *, is_evidence: bool) -> None:
        """One more job."""
        self.runs.append(run)
        if is_evidence:
            self.evidence.append((run.key, run.evidence))

    def add_row(self, shadow: ShadowRun, source: CountSource) -> None:
        """One more row of evidence_rows."""
        self.evidence.append((shadow.key, shadow.evidence))
        if source not in (CountSource.DRAFTED, CountSource.SCORED):
            self.scored.append(shadow.key)


class PastStore:
    """Reads history up to a moment."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def evidence_by_key(
        self, target_revision: str, engine: str, until: datetime, half_life: timedelta, *, task: str | None = None
    ) -> dict[EvidenceKey, KeyEvidence]:
        """The evidence of a target on an engine at `until`, by key: exactly what acceptance_state held.

        Before the first day of the ledger it is estimated from completed hours (alphaloop.store.hours), and for
        tasks other than `task` from days, by drafter alone.
        """
        ledger = LedgerStore(self._database)
        if ledger.covers(until):
            return ledger.evidence(target_revision, engine, until, half_life)
        hours = acceptance_hourly.c
        within = (
            hours.target_revision == target_revision,
            hours.engine == engine,
            hours.purpose != Purpose.CONTROL,
            hours.bucket > until - NUM_HALF_LIVES * half_life,
            hours.bucket < _start_of_hour(until),
        )
        by_hour = select(acceptance_hourly).where(*within).order_by(*(hours[name] for name in _KEY), hours.bucket)
        found: dict[EvidenceKey, KeyEvidence] = {}
        with self._database.begin() as connection:
            queries = [by_hour if task is None else by_hour.where(hours.task == task)]
            if task is not None:
                queries.append(_by_day().where(*within, hours.task != task))
            for query in queries:
                rows = connection.execute(query.execution_options(yield_per=2000))
                for key, of_it in groupby(rows, key_of):
                    found[key] = evidence_of([sums_of_hour(row, until=until) for row in of_it], half_life)
        return found

    def recorded(self, since: datetime, until: datetime, *, task: str | None = None) -> Iterator[Recorded]:
        """What was recorded in [since, until), a transaction at a time and in order, read as it is asked for."""
        queries = [
            _recorded(table, since, until, task).execution_options(yield_per=1000)
            for table in (decode_runs, evidence_rows)
        ]
        with (
            self._database.begin() as connection,
            connection.execute(queries[0]) as runs,
            connection.execute(queries[1]) as rows,
        ):
            both = heapq.merge(
                ((row.recorded_in, row.ledger_id, True, row) for row in runs),
                ((row.recorded_in, row.ledger_id, False, row) for row in rows),
            )
            for _, group in groupby(both, itemgetter(0)):
                found = Recorded()
                for _, _, is_run, row in group:
                    if is_run:
                        found.add_run(_run(row), is_evidence=row.is_evidence)
                    else:
                        found.add_row(shadow_of(row), CountSource(row.source))
                yield found

    def first_and_last(self, task: str | None = None) -> tuple[datetime, datetime] | None:
        """When the first and the last job that is kept were recorded; None if there is none."""
        runs = decode_runs.c
        query = select(func.min(runs.recorded_at), func.max(runs.recorded_at))
        if task is not None:
            query = query.where(runs.task == task)
        with self._database.begin() as connection:
            first, last = connection.execute(query).one()
        return None if first is None else (first, last)

    def tasks(self) -> list[str]:
        """Every task that history knows."""
        with self._database.begin() as connection:
            return sorted(connection.execute(select(acceptance_hourly.c.task).distinct()).scalars())


def _recorded(table: Table, since: datetime, until: datetime, task: str | None) -> Select[Any]:
    columns = table.c
    query = (
        select(table)
        .where(columns.recorded_at >= since, columns.recorded_at < until)
        .where(columns.decoded_at >= since - LONGEST_WAIT, columns.decoded_at < until + LONGEST_WAIT)
        .order_by(columns.recorded_in, columns.ledger_id)
    )
    return query if task is None else query.where(columns.task == task)


def _by_day() -> Select[Any]:
    hours = acceptance_hourly.c
    bucket = func.date_trunc("day", hours.bucket, "UTC") + literal(_MIDDLE_OF_DAY, Interval)
    apart = ("task", "target_revision", "drafter", "draft_revision", "engine")
    same = [literal("").label(name) for name in _KEY if name not in apart]
    keys = [hours[name] for name in apart]
    sums = [_sum(column).label(column.name) for column in _SUMS]
    day = bucket.label("bucket")
    return (
        select(day, *keys, *same, hours.mode, hours.num_draft_tokens, *sums)
        .group_by(day, *keys, hours.mode, hours.num_draft_tokens)
        .order_by(*keys, day)
    )


def _sum(column: Column[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, ARRAY):
        return func.sum_by_position(column, type_=column.type)
    return cast(func.sum(column), Double if isinstance(column.type, Double) else BigInteger)


def _run(row: Row[Any]) -> DecodeRun:
    facts = {name: getattr(row, name) for name in _RUN}
    return DecodeRun(key=key_of(row), counts=counts_of(row), chances=tuple(row.chances), **facts)


def _start_of_hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)
