"""The drift test over a real database: what a run reads, stores and says."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from alphaloop.errors import StoreUnavailable
from alphaloop.measurements import AcceptedLevel
from alphaloop.settings import SchedulerSettings
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftMemoryStore, Position, TaskMemory
from alphaloop.tables import drift_memories
from scheduler.drift.memory import NUM_JOBS
from scheduler.drift.watching import State, WatchedStream, watch_traffic
from tests.fixtures.history import History

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
START, STEP = NOW - timedelta(days=5), timedelta(minutes=10)
SETTINGS = SchedulerSettings()


@pytest.fixture(autouse=True)
def short_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has its reference soon."""
    monkeypatch.setattr("scheduler.drift.phases.REFERENCE_JOBS", 32)


class Dies(DriftMemoryStore):
    """The process ends after reading and before storing."""

    def save(self, *given: object) -> None:
        raise StoreUnavailable("gone")


@pytest.fixture
def store(database: Database) -> DriftMemoryStore:
    return DriftMemoryStore(database)


def num_read(memory: TaskMemory) -> int:
    return sum(int(WatchedStream.of(its.document).memory.clock[NUM_JOBS]) for its in memory.memories.values())


def test_a_run_reads_what_is_new(store: DriftMemoryStore, history: History) -> None:
    for number in range(3):
        end = history.traffic("code", 0.8, 20, START + 20 * number * STEP, STEP)
        watch_traffic(store, SETTINGS, end)
        assert num_read(store.load("code")) == 20 * (number + 1)
    watch_traffic(store, SETTINGS, end)
    assert num_read(store.load("code")) == 60


def test_a_run_that_dies_before_it_stores_is_repeated_exactly(
    database: Database, store: DriftMemoryStore, history: History
) -> None:
    end = history.traffic("code", 0.8, 50, START, STEP)
    watch_traffic(store, SETTINGS, end)
    later = history.traffic("code", 0.6, 50, end, STEP)
    with pytest.raises(StoreUnavailable):
        watch_traffic(Dies(database), SETTINGS, later)
    verdicts = watch_traffic(store, SETTINGS, later)
    assert num_read(store.load("code")) == 100
    assert watch_traffic(store, SETTINGS, later) == verdicts


def test_a_memory_of_another_version_is_learned_anew(
    database: Database, store: DriftMemoryStore, history: History, caplog: pytest.LogCaptureFixture
) -> None:
    end = history.traffic("code", 0.8, 50, START, STEP)
    watch_traffic(store, SETTINGS, end)
    database.change(update(drift_memories).values(version=0, document={}))
    later = history.traffic("code", 0.8, 10, end, STEP)
    with caplog.at_level(logging.WARNING):
        (verdict,) = watch_traffic(store, SETTINGS, later)
    assert verdict.state is State.TOO_LITTLE
    assert "begins anew" in caplog.text
    assert num_read(store.load("code")) == 10


def test_a_switch_of_another_version_begins_anew(store: DriftMemoryStore, history: History) -> None:
    """Its threshold moves the acceptance of the rounds that it leaves to each source: no change of the traffic."""
    first, second = (f"hybrid1-switch-p{at}(lookup=lookup-1+heads=heads-1)" for at in (0.5, 0.3))
    end = history.traffic("code", 0.8, 100, START, STEP, revision=first)
    watch_traffic(store, SETTINGS, end)
    end = history.traffic("code", 0.5, 100, end, STEP, revision=second)
    (verdict,) = watch_traffic(store, SETTINGS, end)
    assert verdict.subject.draft_revision == second
    assert verdict.state not in (State.FELL, State.ROSE)
    fallen = history.traffic("code", 0.2, 60, end, STEP, revision=second)
    (verdict,) = watch_traffic(store, SETTINGS, fallen)
    assert (verdict.subject.draft_revision, verdict.state) == (second, State.FELL)


def test_an_accepted_level_is_learned_from_the_jobs_after_it(store: DriftMemoryStore, history: History) -> None:
    end = history.traffic("code", 0.8, 50, START, STEP)
    history.traffic("sql", 0.8, 50, START, STEP)
    watch_traffic(store, SETTINGS, end)
    unread = history.traffic("code", 0.6, 5, end, STEP)
    accepted = {("code", "lookup"): AcceptedLevel(unread, end)}
    found = watch_traffic(store, SETTINGS, unread + timedelta(minutes=1), accepted)
    assert {verdict.subject.task: verdict.num_jobs_before for verdict in found} == {"code": 0, "sql": 32}
    later = history.traffic("code", 0.6, 10, unread + STEP, STEP)
    watch_traffic(store, SETTINGS, later, accepted)
    assert (num_read(store.load("code")), num_read(store.load("sql"))) == (10, 50)
    again = watch_traffic(store, SETTINGS, later, accepted)
    assert {verdict.subject.task: verdict.num_jobs_before for verdict in again}["code"] == 10, "forgotten once"


def test_what_was_learned_is_forgotten_also_when_no_job_is_new(store: DriftMemoryStore, history: History) -> None:
    end = history.traffic("code", 0.8, 50, START, STEP)
    watch_traffic(store, SETTINGS, end)
    accepted = {("code", "lookup"): AcceptedLevel(end, None)}
    watch_traffic(store, SETTINGS, end, accepted)
    memory = store.load("code")
    assert num_read(memory) == 0
    assert [its.norm_since for its in memory.memories.values()] == [end]


def test_the_first_run_begins_with_the_window(
    store: DriftMemoryStore, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.drift.watching.WINDOW", timedelta(hours=3))
    history.traffic("code", 0.8, 30, NOW - timedelta(hours=6), STEP)
    watch_traffic(store, SETTINGS, NOW)
    memory = store.load("code")
    assert isinstance(memory.position, Position)
    assert num_read(memory) == 12
