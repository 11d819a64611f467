"""The time of day comes from the database, whatever the clock of this machine says."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database, DatabaseClock, followed

pytestmark = pytest.mark.postgres


def of_the_database(database: Database) -> datetime:
    moment: datetime = database.scalar(text("SELECT clock_timestamp()"))
    return moment


def test_a_wrong_clock_of_the_machine_changes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    clock = DatabaseClock(database)
    before = of_the_database(database)
    told = [clock.now(), clock.measure(), clock.now()]
    after = of_the_database(database)
    assert before <= told[0] <= told[1]
    # Half a round trip, which takes less than the whole test.
    assert told[2] <= after + (after - before)
    assert {moment.tzinfo for moment in told} == {UTC}


def test_a_slow_answer_does_not_replace_a_quick_one(database: Database) -> None:
    """Between two measurements the monotonic clock tells the time."""
    ticks = iter((0.0, 5.0, 7.0, 10.0, 10.1, 20.0, 29.0, 40.05))
    clock = DatabaseClock(database, monotonic=ticks.__next__)
    first = clock.measure()
    assert clock.now() == first + timedelta(seconds=4.5)
    quick = clock.measure()
    slow = clock.measure()
    assert first < quick < slow
    assert clock.now() == quick + timedelta(seconds=30.0)


@pytest.mark.parametrize(
    ("ahead_s", "left_s"),
    [(0.0, 0.0), (0.3, 0.3), (-0.3, -0.3), (0.6, 0.4), (-0.6, -0.4), (0.9, 0.0), (-0.9, 0.0), (-3600.0, 0.0)],
)
def test_the_time_is_changed_as_little_as_an_answer_asks_for(ahead_s: float, left_s: float) -> None:
    """A round trip of .8 s leaves a doubt of .4 s: what agrees stays, what drifted moves, what was set is set."""
    told = datetime(2026, 11, 25, tzinfo=UTC)
    moment, at = followed((told + timedelta(seconds=ahead_s - 100), -89.6), told, 10.0, 10.8)
    assert (moment - told).total_seconds() + 10.4 - at == pytest.approx(left_s, abs=2e-6)


def test_one_answer_slower_than_another_does_not_set_the_clock_back(database: Database) -> None:
    clock = DatabaseClock(database)
    told = [clock.now()]
    for _ in range(200):
        clock.measure()
        told.append(clock.now())
    assert told == sorted(told)
