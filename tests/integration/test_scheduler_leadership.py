"""Two schedulers on one database: one leads; when its lease runs out the other takes over."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.store.coordination import LeaderLease, ScheduleStore
from alphaloop.store.database import Database
from scheduler.leadership import Leadership
from scheduler.timetable import every

pytestmark = pytest.mark.postgres


class Process:
    """One scheduler's leadership, and what it was told."""

    def __init__(self, database: Database, name: str) -> None:
        self.told: list[str] = []
        self.leadership = Leadership(
            LeaderLease(database, name, lease_s=600.0),
            promote=lambda term: self.told.append("promoted"),
            demote=lambda: self.told.append("demoted"),
        )


@pytest.fixture
def two(database: Database) -> tuple[Process, Process]:
    return Process(database, "first"), Process(database, "second")


def test_one_leads_and_is_followed_when_its_lease_ran_out(two: tuple[Process, Process], database: Database) -> None:
    first, second = two
    assert [first.leadership.check(), second.leadership.check(), first.leadership.check()] == [True, False, True]
    assert (first.told, second.told) == (["promoted"], [])
    database.change(text("UPDATE leader_leases SET expires_at = now()"))
    assert second.leadership.check()
    assert first.leadership.leads, "it has not looked yet"
    assert not first.leadership.check()
    assert (first.told, second.told) == (["promoted", "demoted"], ["promoted"])
    assert not first.leadership.check()


def test_a_run_that_is_finished_at_a_stop_keeps_the_lease(database: Database) -> None:
    """The stop takes longer than the lease, which is renewed until the run has ended."""
    second = Process(database, "second")
    seen: list[bool] = []

    def finish() -> None:
        for _ in range(5):
            time.sleep(0.25)
            seen.append(second.leadership.check())

    lease = LeaderLease(database, "first", lease_s=1.0)
    first = Leadership(lease, promote=lambda term: None, demote=finish, check_s=0.1)
    assert first.check()
    first.resign()
    assert seen == [False] * 5
    assert second.leadership.check()


def test_an_unreachable_database_elects_nobody() -> None:
    with Database(SecretStr("postgresql://nobody@127.0.0.1:1/none"), connect_timeout_s=2) as nowhere:
        alone = Process(nowhere, "alone")
        assert not alone.leadership.check()
    assert alone.told == []


def test_three_schedulers_fire_each_due_time_once(database_url: SecretStr) -> None:
    """Each with its own connections, all of them sure that they lead, at the same times of one timetable."""
    table, begin = every(60.0), datetime(2026, 1, 5, tzinfo=UTC)
    dues = [table.due_at(begin + timedelta(seconds=60 * i)) for i in range(10)]
    claimed: list[tuple[str, datetime]] = []
    barrier = threading.Barrier(3)

    def schedule(owner: str) -> None:
        with Database(database_url, pool_size=1) as database:
            store = ScheduleStore(database)
            for due in dues:
                barrier.wait(30)
                if store.claim("measure", due, owner, due):
                    claimed.append((owner, due))

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(schedule, owner) for owner in ("a", "b", "c")]:
            future.result(60)
    assert sorted(due for _, due in claimed) == dues
