"""What the drift test remembers, on a real database: pages of new jobs, and memories stored with their position."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.errors import StoreBusy
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftMemoryStore, Position, StoredMemory
from tests.fixtures.drift import STREAM
from tests.fixtures.history import History

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MEMORY = StoredMemory(1, {"numbers": [1.0, 0.1]}, NOW - HOUR)


@pytest.fixture
def store(database: Database) -> DriftMemoryStore:
    return DriftMemoryStore(database)


def test_pages_follow_each_other_without_a_gap_or_a_repetition(store: DriftMemoryStore, history: History) -> None:
    start = NOW - 2 * HOUR
    # Pairs of jobs of the same moment: the page ends between two of them.
    history.traffic("code", 0.7, 5, start, MINUTE)
    history.traffic("code", 0.7, 5, start, MINUTE)
    history.traffic("sql", 0.7, 3, start, MINUTE)
    history.vanilla("code", 4, start, MINUTE)
    position, seen = Position(start - MINUTE, 0), []
    while jobs := store.page("code", position, NOW, 3):
        position = Position(jobs[-1].decoded_at, jobs[-1].ledger_id)
        seen += [(job.decoded_at, job.ledger_id) for job in jobs]
    assert len(seen) == 10
    assert seen == sorted(set(seen))
    assert store.tasks(start - MINUTE, NOW) == ["code", "sql"]
    behind = store.page("code", Position(start - MINUTE, 0), start + 2 * MINUTE, 100)
    assert len(behind) == 6, "those behind the end are left to the next run"


def test_the_jobs_of_a_month_are_counted_in_proportion(store: DriftMemoryStore, history: History) -> None:
    assert store.jobs_a_month(NOW, 30 * DAY) == 0
    history.traffic("code", 0.7, 40, NOW - 4 * DAY, MINUTE)
    history.traffic("sql", 0.7, 8, NOW - 3 * DAY, MINUTE)
    assert store.jobs_a_month(NOW, 30 * DAY) == pytest.approx(48 * 30 / 4, rel=0.02)


def test_what_was_stored_is_loaded(store: DriftMemoryStore) -> None:
    assert store.load("code").position is None
    position = Position(NOW - HOUR, 7)
    store.save("code", None, position, {STREAM: MEMORY})
    loaded = store.load("code")
    assert (loaded.position, loaded.memories) == (position, {STREAM: MEMORY})
    assert store.load("sql").position is None
    for forgotten_before, is_left in ((NOW - 2 * HOUR, True), (NOW, False)):
        store.forget(forgotten_before)
        assert bool(store.load("code").memories) is is_left, "streams without a job"


@pytest.mark.parametrize("read_from", [None, Position(NOW - DAY, 3)])
def test_a_run_that_was_overtaken_stores_nothing(store: DriftMemoryStore, read_from: Position | None) -> None:
    first = Position(NOW - HOUR, 7)
    store.save("code", None, first, {STREAM: MEMORY})
    with pytest.raises(StoreBusy, match="task code: another run has read"):
        store.save("code", read_from, Position(NOW, 9), {})
    assert store.load("code").position == first
    assert store.load("code").memories == {STREAM: MEMORY}
