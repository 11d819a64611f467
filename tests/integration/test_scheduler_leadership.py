"""Two schedulers on one database: one leads; when it loses its connection the other takes over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from pydantic import SecretStr

from alphaloop.store.database import Database
from alphaloop.store.schedule import AdvisoryLock, ScheduleStore
from scheduler.leadership import Leadership
from scheduler.timetable import every
from tests.fixtures.worker import until

pytestmark = pytest.mark.postgres


class Process:
    """One scheduler's leadership, and what it was told."""

    def __init__(self, url: SecretStr) -> None:
        self.told: list[str] = []
        self.lock = AdvisoryLock(url)
        self.leadership = Leadership(
            self.lock, promote=lambda term: self.told.append("promoted"), demote=lambda: self.told.append("demoted")
        )


@pytest.fixture
def two(database_url: SecretStr) -> Iterator[tuple[Process, Process]]:
    processes = Process(database_url), Process(database_url)
    yield processes
    for process in processes:
        process.lock.release()


def test_one_leads(two: tuple[Process, Process]) -> None:
    first, second = two
    assert [first.leadership.check(), second.leadership.check(), first.leadership.check()] == [True, False, True]
    assert (first.told, second.told) == (["promoted"], [])


def test_a_killed_leader_is_followed(two: tuple[Process, Process], database_url: SecretStr) -> None:
    first, second = two
    first.leadership.check()
    with psycopg.connect(database_url.get_secret_value(), autocommit=True) as killer:
        killer.execute("SELECT pg_terminate_backend(%s, 5000)", (first.lock.backend_pid,))
    assert second.leadership.check()
    assert first.leadership.leads, "it has not looked yet"
    assert not first.leadership.check()
    assert (first.told, second.told) == (["promoted", "demoted"], ["promoted"])
    assert not first.leadership.check()


def test_a_resigning_leader_stops_before_the_next_starts(two: tuple[Process, Process]) -> None:
    first, second = two
    first.leadership.check()
    first.leadership.resign()
    assert first.told == ["promoted", "demoted"]
    # The server frees a lock a moment after its connection was closed.
    until(second.leadership.check, "the second leads")


def test_an_unreachable_database_elects_nobody() -> None:
    alone = Process(SecretStr("postgresql://nobody@127.0.0.1:1/none"))
    assert not alone.leadership.check()
    assert alone.told == []


def test_three_schedulers_fire_each_due_time_once(database_url: SecretStr) -> None:
    """Each with its own connections, all of them sure that they lead, at the same times of one timetable."""
    table, begin = every(60.0, jitter_s=20.0), datetime(2026, 1, 5, tzinfo=UTC)
    dues = [table.due_at(begin + timedelta(seconds=60 * i)) for i in range(10)]
    claimed: list[tuple[str, datetime]] = []
    barrier = threading.Barrier(3)

    def schedule(owner: str) -> None:
        with Database(database_url, pool_size=1) as database:
            store = ScheduleStore(database)
            for due in dues:
                barrier.wait(30)
                if store.claim("measure", due, owner, table.begins_at(due)):
                    claimed.append((owner, due))

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(schedule, owner) for owner in ("a", "b", "c")]:
            future.result(60)
    assert sorted(due for _, due in claimed) == dues
