"""Which snapshots of decisions are written, and when; on a store that remembers its rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final, cast
from uuid import uuid4

import pytest

from alphaloop.deciding.job_facts import PolicyLimits
from alphaloop.deciding.snapshot import SessionFacts, Snapshot
from alphaloop.errors import StoreUnavailable
from alphaloop.store.snapshots import SnapshotRow, SnapshotStore
from tests.fixtures.deciding import some_snapshot
from worker.deciding import keeping as module
from worker.deciding.keeping import WRITE_EVERY_S, SnapshotJournal

NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
FACTS: Final = SessionFacts("w", "h", "d", "e", "t", 4, timedelta(days=3), PolicyLimits())


def decision(now: datetime = NOON) -> Snapshot:
    return replace(some_snapshot(), decision_id=uuid4(), decided_at=now)


class Store:
    """Rows as they were written; away while told so."""

    def __init__(self) -> None:
        self.rows: list[SnapshotRow] = []
        self.is_away = False

    def add(self, rows: Sequence[SnapshotRow]) -> None:
        if self.is_away:
            raise StoreUnavailable("no connection")
        self.rows += rows


class Made:
    """A journal whose clock is the test's."""

    def __init__(self) -> None:
        self.store, self.now_s = Store(), 0.0
        self.journal = SnapshotJournal(cast(SnapshotStore, self.store), FACTS, clock=lambda: self.now_s)


def test_decisions_are_written_once_a_second() -> None:
    made = Made()
    assert not made.journal.is_due
    made.journal.note(decision())
    assert made.journal.is_due
    made.journal.write()
    made.journal.note(decision())
    assert not made.journal.is_due
    made.now_s += WRITE_EVERY_S
    assert made.journal.is_due
    made.journal.write()
    assert len(made.store.rows) == 2


def test_decisions_wait_for_a_database_that_is_away_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    made = Made()
    made.store.is_away = True
    noted = [decision() for _ in range(5)]
    for one in noted:
        made.journal.note(one)
        with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable):
            made.journal.write()
    made.store.is_away = False
    made.now_s += WRITE_EVERY_S
    assert made.journal.is_due
    made.journal.write()
    assert [row.decision_id for row in made.store.rows] == [one.decision_id for one in noted[2:]]
    assert [record.getMessage() for record in caplog.records] == ["1 decisions not recorded"] * 2
