"""Notices of changed drafts and drift out of a real PostgreSQL, and what becomes of them when connections break."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.measurements import DriftSubject
from alphaloop.store.database import Database, Listener
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from alphaloop.store.jobs import JobStore
from tests.fixtures.drift import content
from worker.presence import Watch

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]

SOON_S = 30.0
LISTENERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"


@pytest.fixture
def listener(database: Database) -> Iterator[Listener]:
    listener = Listener(database)
    yield listener
    listener.close()


@pytest.fixture
def registry(database: Database) -> DraftRegistry:
    registry = DraftRegistry(database)
    registry.register("small", "r1", "t")
    return registry


def kill_listeners(database: Database) -> int:
    return len(database.rows(text(LISTENERS.replace("pid", "pg_terminate_backend(pid)", 1))))


@contextmanager
def watching(listener: Any, refresh: Callable[[], None], *, every_s: float) -> Iterator[None]:
    watch = Watch(listener, refresh, every_s=every_s)
    watch.thread.start()
    try:
        yield
    finally:
        watch.thread.end(SOON_S)


def test_a_cancellation_is_told_to_every_worker_at_once(database: Database, listener: Listener) -> None:
    assert listener.wait(0.0), "it may have missed something before it listened"
    assert not listener.wait(0.05)
    JobStore(database).request_cancel("job-1")
    assert listener.wait(SOON_S)
    JobStore(database).request_cancel("job-1")
    assert listener.wait(SOON_S), "who missed the first notice hears the second"


@pytest.mark.roles  # it does what no worker may
def test_changed_drafts_and_drift_are_told_whoever_changes_them(
    database: Database, listener: Listener, registry: DraftRegistry
) -> None:
    drift, subject = DriftEventStore(database), DriftSubject("code", "small", "r1", "t")
    now = datetime.now(UTC)
    changes: list[Callable[[], object]] = [
        lambda: registry.set_status("small", "r1", "t", DraftStatus.STALE, "fell"),
        lambda: registry.register("small", "r2", "t"),
        lambda: drift.write([EventChange(None, EventState.OPENED, content(subject), "α_1 fell")], now),
        lambda: drift.write(
            [EventChange(e.id, EventState.CLOSED, e.content, "It is back.") for e in drift.open_events()], now
        ),
        lambda: database.change(text("UPDATE draft_revisions SET status = 'active'")),
    ]
    listener.wait(0.0)
    for change in changes:
        change()
        assert listener.wait(SOON_S)
        assert not listener.wait(0.02)


def test_what_was_rolled_back_is_not_told(database: Database, listener: Listener, registry: DraftRegistry) -> None:
    listener.wait(0.0)
    failing = text("UPDATE draft_revisions SET status = 'stale', registered_at = now() - interval '1 s' / 0")
    with pytest.raises(StoreError, match="division by zero"):
        database.change(failing)
    assert not listener.wait(0.05)


def test_a_lost_connection_is_said_and_made_anew(database: Database, listener: Listener) -> None:
    listener.wait(0.0)
    assert kill_listeners(database) == 1
    with pytest.raises(StoreUnavailable):
        listener.wait(SOON_S)
    assert listener.wait(0.0)
    assert not listener.wait(0.02)


def test_nobody_there_is_said_without_the_password() -> None:
    nowhere = Database(SecretStr("postgresql://u:secret@127.0.0.1:1/x"))
    with pytest.raises(StoreUnavailable) as refusal:
        Listener(nowhere).wait(0.0)
    assert "secret" not in refusal.value.message


def test_a_watch_whose_connection_is_killed_listens_again(database: Database, registry: DraftRegistry) -> None:
    looks = threading.Semaphore(0)
    is_stale = threading.Event()

    def refresh() -> None:
        if registry.stale("t"):
            is_stale.set()
        looks.release()

    with watching(Listener(database), refresh, every_s=3600.0):
        assert looks.acquire(timeout=SOON_S)
        assert kill_listeners(database) == 1
        assert looks.acquire(timeout=SOON_S)  # the new connection may have missed a notice
        registry.set_status("small", "r1", "t", DraftStatus.STALE, "fell")
        assert is_stale.wait(SOON_S)


class Deaf:
    """No connection to listen on can be had."""

    def wait(self, timeout_s: float) -> bool:
        raise StoreUnavailable("too many connections")

    def close(self) -> None:
        pass


def test_a_watch_that_cannot_listen_still_looks_and_a_look_that_fails_comes_again(
    database: Database, registry: DraftRegistry
) -> None:
    failed, is_stale = threading.Event(), threading.Event()

    def refresh() -> None:
        if not failed.is_set():
            failed.set()
            raise StoreUnavailable("away")
        if registry.stale("t"):
            is_stale.set()

    with watching(Deaf(), refresh, every_s=0.05):
        registry.set_status("small", "r1", "t", DraftStatus.STALE, "fell")
        assert is_stale.wait(SOON_S)
