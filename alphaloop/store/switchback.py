"""The switchback experiment: slices, the speed-ups computed from them, and pairs of expected and measured ones.

Pairs are closed with the slices of the experiment and outlive them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, Table, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from alphaloop.acceptance import Interval
from alphaloop.deciding.expectation_error import MOST_PAIRS
from alphaloop.experiment.estimate import Verdict
from alphaloop.experiment.figures import (
    ExpectationPair,
    SpeedupSubject,
    TaskSpeedup,
    expectation_pair,
    over_rivals,
    over_vanilla,
    shown_of,
    task_speedup,
)
from alphaloop.experiment.observe import Phase, Slice, Treatment
from alphaloop.store.database import Store, of_row, values_of
from alphaloop.store.housekeeping import ensure_days, utc_day
from alphaloop.tables import SUBJECT, expectation_pairs, rival_speedups, switchback_slices, task_speedups

#: The time that a speed-up covers. The view task_speedup_now shows nothing older.
WINDOW: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class SliceRow:
    """A slice and its subject."""

    subject: SpeedupSubject
    slice: Slice
    owner: str  #: worker that decoded it


class SwitchbackStore(Store):
    """Keeps slices, and the measured speed-up of each subject over the last `WINDOW`."""

    def add(self, rows: Sequence[SliceRow]) -> None:
        """Store slices. One that is stored already is left as it is, so a call may be repeated."""
        if not rows:
            return
        with self._database.begin() as connection:
            ensure_days(connection, {utc_day(row.slice.started_at) for row in rows})
            connection.execute(insert(switchback_slices).on_conflict_do_nothing(), [_slice_values(row) for row in rows])

    def read(self, since: datetime, task: str | None = None, *, until: datetime | None = None) -> list[SliceRow]:
        """Slices that began in [since, until), in order; of one task or all."""
        query = _slices(since, until, None if task is None else [task])
        return [_row(row) for row in self._database.rows(query.order_by(*_IN_TIME))]

    def refresh(self, now: datetime, tasks: Collection[str] | None = None) -> int:
        """Compute the speed-ups of these tasks, or of all, from the slices up to `now`; returns how many.

        Expectations are compared with what was measured, where the slices since the last comparison suffice. Rows of
        subjects without a slice in the window are dropped when all tasks are refreshed.
        """
        with self._database.begin() as connection:
            ended = _last_ends(connection, now - WINDOW)
            speedups: list[TaskSpeedup] = []
            rivals: list[TaskSpeedup] = []
            pairs: list[ExpectationPair] = []
            for subject, slices in _by_subject(connection, now, tasks):
                vanilla = over_vanilla(slices)
                speedups += _speedup_of(subject, vanilla, now)
                rivals += (task_speedup(subject, parts, now, against) for against, parts in over_rivals(slices).items())
                later = [part for part in vanilla if part.started_at > ended.get(subject, _EARLIEST)]
                if (pair := expectation_pair(subject, later, now)) is not None:
                    pairs.append(pair)
            if pairs:  # two workers of one host may close the same pair: the first one counts
                values = [_pair_values(pair) for pair in pairs]
                connection.execute(insert(expectation_pairs).on_conflict_do_nothing(), values)
            for table, computed in ((task_speedups, speedups), (rival_speedups, rivals)):
                if tasks is None:
                    connection.execute(delete(table).where(table.c.covers_to < now - WINDOW))
                _replace(connection, table, computed)
        return len(speedups)

    def rivals(self, now: datetime) -> list[TaskSpeedup]:
        """How many times faster drafters are than those on trial with them, the newest slices first."""
        rows = rival_speedups.c
        query = select(rival_speedups).where(rows.covers_to >= now - WINDOW).order_by(rows.covers_to.desc(), rows.task)
        return [_speedup(row, row.against) for row in self._database.rows(query)]

    def over_vanilla(self, now: datetime) -> list[TaskSpeedup]:
        """How many times faster drafters are than vanilla, every drafter of a task."""
        rows = self._database.rows(select(task_speedups).where(task_speedups.c.covers_to >= now - WINDOW))
        return [_speedup(row) for row in rows]

    def shown(self, now: datetime) -> dict[str, TaskSpeedup]:
        """What is shown of each task, by task: the rows of the view task_speedup_now."""
        by_task: dict[str, list[TaskSpeedup]] = {}
        for one in self.over_vanilla(now):
            by_task.setdefault(one.subject.task, []).append(one)
        return {task: shown for task, speedups in by_task.items() if (shown := shown_of(speedups)) is not None}

    def at(self, task: str, moment: datetime) -> TaskSpeedup | None:
        """What was shown of a task at an earlier moment; None without a slice in the window before it."""
        with self._database.begin() as connection:
            by_subject = _by_subject(connection, moment, [task])
            return shown_of(
                speedup
                for subject, slices in by_subject
                for speedup in _speedup_of(subject, over_vanilla(slices), moment)
            )


#: The time whose pairs screens show. The view expectation_now shows the same.
SHOWN: Final = timedelta(days=7)


class ExpectationStore(Store):
    """Reads pairs."""

    def newest(
        self,
        target_revision: str,
        engine: str,
        device: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[ExpectationPair]:
        """The pairs that correct expectations on such a device, of whichever host: the newest of each task and drafter.

        With `since`, at least those that were closed after that moment; with `until`, none that was closed later.
        """
        pairs = expectation_pairs.c
        where = [pairs.target_revision == target_revision, pairs.engine == engine, pairs.device == device]
        if since is not None:
            where.append(pairs.computed_at > since - _LATE)
        if until is not None:
            where.append(pairs.computed_at <= until)
        return self._read(where)

    def shown(self, now: datetime, task: str | None = None) -> list[ExpectationPair]:
        """The pairs that screens show, of every task or one: the newest of each task and drafter in a week."""
        pairs = expectation_pairs.c
        where = [pairs.computed_at > now - SHOWN, pairs.computed_at <= now]
        return self._read(where if task is None else [*where, pairs.task == task])

    def _read(self, where: Iterable[Any]) -> list[ExpectationPair]:
        pairs = expectation_pairs.c
        age = func.row_number().over(partition_by=(pairs.task, pairs.drafter), order_by=pairs.covers_to.desc())
        newest = select(expectation_pairs, age.label("age")).where(*where).subquery()
        query = select(newest).where(newest.c.age <= MOST_PAIRS).order_by(newest.c.covers_to, newest.c.task)
        return [_pair(row) for row in self._database.rows(query)]


#: Slices that are fetched together.
_AT_ONCE: Final = 2_000
_IN_TIME: Final = (switchback_slices.c.started_at, switchback_slices.c.block_id)


def _slices(since: datetime, until: datetime | None, tasks: Collection[str] | None) -> Select[Any]:
    slices = switchback_slices.c
    query = select(switchback_slices).where(slices.started_at >= since)
    if until is not None:
        query = query.where(slices.started_at < until)
    return query if tasks is None else query.where(slices.task.in_(tasks))


def _by_subject(
    connection: Connection, now: datetime, tasks: Collection[str] | None
) -> Iterator[tuple[SpeedupSubject, list[Slice]]]:
    """The slices of the window before `now`, in order; those of one subject at a time are in memory."""
    subject = [switchback_slices.c[name] for name in SUBJECT]
    query = _slices(now - WINDOW, now, tasks).order_by(*subject, *_IN_TIME)
    with connection.execute(query, execution_options={"yield_per": _AT_ONCE}) as rows:
        for of, subject_slices in groupby(map(_row, rows), key=lambda row: row.subject):
            yield of, [row.slice for row in subject_slices]


def _speedup_of(subject: SpeedupSubject, slices: Sequence[Slice], now: datetime) -> list[TaskSpeedup]:
    """None without a slice of the treatment."""
    is_treated = any(part.phase is not Phase.CONTROL for part in slices)
    return [task_speedup(subject, slices, now)] if is_treated else []


def _replace(connection: Connection, table: Table, speedups: Sequence[TaskSpeedup]) -> None:
    """Write these over the rows of the same subjects, as far as the table has columns."""
    if not speedups:
        return
    rows = [_speedup_values(speedup) for speedup in speedups]
    statement = insert(table)
    names = [column.name for column in table.c if not column.primary_key]
    statement = statement.on_conflict_do_update(
        index_elements=list(table.primary_key), set_={name: statement.excluded[name] for name in names}
    )
    connection.execute(statement, [{column.name: row[column.name] for column in table.c} for row in rows])


def _slice_values(row: SliceRow) -> dict[str, Any]:
    drafted = {"num_draft_tokens": row.slice.treatment.num_draft_tokens}
    return values_of(row.slice, "task", "treatment") | values_of(row.subject) | drafted | {"owner": row.owner}


def _row(row: Row[Any]) -> SliceRow:
    treatment = Treatment(row.drafter, row.num_draft_tokens)
    return SliceRow(
        of_row(SpeedupSubject, row), of_row(Slice, row, phase=Phase(row.phase), treatment=treatment), row.owner
    )


def _bounds(name: str, found: Interval | None) -> dict[str, float | None]:
    """The three columns of a figure with its bounds."""
    mean, low, high = (found.mean, found.low, found.high) if found else (None, None, None)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _speedup_values(one: TaskSpeedup) -> dict[str, Any]:
    return values_of(one, "subject", "speedup") | values_of(one.subject) | _bounds("speedup", one.speedup)


def _speedup(row: Row[Any], against: str = "") -> TaskSpeedup:
    bounds = None if row.speedup is None else Interval(row.speedup, row.speedup_low, row.speedup_high)
    subject = of_row(SpeedupSubject, row)
    return of_row(TaskSpeedup, row, subject=subject, speedup=bounds, verdict=Verdict(row.verdict), against=against)


#: A transaction that closes a pair ends within this time of the pair's `computed_at`.
_LATE: Final = timedelta(minutes=1)
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


def _last_ends(connection: Connection, since: datetime) -> dict[SpeedupSubject, datetime]:
    """When the last slice of each subject's last pair began, of pairs since then."""
    pairs = expectation_pairs.c
    names = [pairs[name] for name in SUBJECT]
    query = select(*names, func.max(pairs.covers_to)).where(pairs.computed_at >= since).group_by(*names)
    return {SpeedupSubject(*names): ended for *names, ended in connection.execute(query)}


def _pair_values(pair: ExpectationPair) -> dict[str, Any]:
    figures = values_of(pair, "subject", "expected", "measured") | values_of(pair.subject)
    return figures | _bounds("expected", pair.expected) | _bounds("speedup", pair.measured)


def _pair(row: Row[Any]) -> ExpectationPair:
    expected = Interval(row.expected, row.expected_low, row.expected_high)
    measured = Interval(row.speedup, row.speedup_low, row.speedup_high)
    subject = of_row(SpeedupSubject, row)
    return of_row(ExpectationPair, row, subject=subject, expected=expected, measured=measured)
