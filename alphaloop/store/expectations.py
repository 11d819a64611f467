"""Pairs of expected and measured speed-ups. They are closed with the slices of the experiment and outlive them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Row, func, select
from sqlalchemy.dialects.postgresql import insert

from alphaloop.acceptance import Interval
from alphaloop.deciding.expectation_error import MOST_PAIRS
from alphaloop.store.database import Database
from alphaloop.switchback.expectation import ExpectationPair, expectation_pair
from alphaloop.switchback.slices import Slice
from alphaloop.switchback.task_speedup import Subject
from alphaloop.tables import expectation_pairs
from alphaloop.tables.switchback import SUBJECT

#: The time whose pairs screens show. The view expectation_now shows the same.
SHOWN: Final = timedelta(days=7)
#: A transaction that closes a pair ends within this time of the pair's `computed_at`.
_LATE: Final = timedelta(minutes=1)
_FIGURES: Final = (
    "uncorrected",
    "model_sd",
    "num_blocks",
    "min_num_draft_tokens",
    "max_num_draft_tokens",
    "mean_running",
    "covers_from",
    "covers_to",
    "computed_at",
)


def pair_since(
    ended: datetime | None, subject: Subject, slices: Sequence[Slice], now: datetime
) -> list[ExpectationPair]:
    """The pair of a subject if its slices since its last pair suffice, else none.

    The slices are those of the last day, or of as long as a pair may take. `ended` is of `last_ends`.
    """
    later = slices if ended is None else [one for one in slices if one.started_at > ended]
    pair = expectation_pair(subject, later, now)
    return [] if pair is None else [pair]


def add_pairs(connection: Connection, pairs: Sequence[ExpectationPair]) -> None:
    """Store pairs. Two workers of one host may close the same pair: the first one counts."""
    if pairs:
        connection.execute(insert(expectation_pairs).on_conflict_do_nothing(), [_values(pair) for pair in pairs])


def last_ends(connection: Connection, since: datetime) -> dict[Subject, datetime]:
    """When the last slice of each subject's last pair began, of pairs since then."""
    pairs = expectation_pairs.c
    names = [pairs[name] for name in SUBJECT]
    query = select(*names, func.max(pairs.covers_to)).where(pairs.computed_at >= since).group_by(*names)
    return {Subject(*names): ended for *names, ended in connection.execute(query)}


class ExpectationStore:
    """Reads pairs."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
        with self._database.begin() as connection:
            return [_pair(row) for row in connection.execute(query)]


def _values(pair: ExpectationPair) -> dict[str, Any]:
    return {
        **asdict(pair.subject),
        **{name: getattr(pair, name) for name in _FIGURES},
        "expected": pair.expected.mean,
        "expected_low": pair.expected.low,
        "expected_high": pair.expected.high,
        "speedup": pair.measured.mean,
        "speedup_low": pair.measured.low,
        "speedup_high": pair.measured.high,
    }


def _pair(row: Row[Any]) -> ExpectationPair:
    return ExpectationPair(
        subject=Subject(**{name: getattr(row, name) for name in SUBJECT}),
        expected=Interval(row.expected, row.expected_low, row.expected_high),
        measured=Interval(row.speedup, row.speedup_low, row.speedup_high),
        **{name: getattr(row, name) for name in _FIGURES},
    )
