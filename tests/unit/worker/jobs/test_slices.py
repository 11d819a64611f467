"""Slices on their way to the store: named for this engine, and speed-ups computed anew only so often."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from alphaloop.store.switchback import SliceRow
from tests.fakes import FakeEngine
from tests.fixtures.slices import block_rows, subject
from worker.steering import REFRESH_EVERY_S, SliceRecorder, TaskSlice

NOW = datetime(2026, 3, 1, tzinfo=UTC)


class Store:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.rows: list[SliceRow] = []
        self.refreshed: list[set[str]] = []

    def add(self, rows: Sequence[SliceRow]) -> None:
        self.rows += rows

    def refresh(self, now: datetime, tasks: Collection[str] | None = None) -> int:
        assert now == NOW
        self.refreshed.append(set(tasks or ()))
        return 1


class Clock:
    """Seconds that pass when told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def slices_of(*tasks: str) -> list[TaskSlice]:
    return [TaskSlice("greedy", row.slice) for task in tasks for row in block_rows(subject(task), NOW, 1)]


def recorder(store: Store, clock: Clock) -> SliceRecorder:
    return SliceRecorder(store, FakeEngine().identity, {"lookup": "r7"}, owner="w1", now=lambda: NOW, clock=clock)


def test_slices_are_stored_for_this_engine_and_the_drafter_that_is_loaded() -> None:
    store = Store()
    slices = slices_of("code")
    recorder(store, Clock()).store(slices)
    identity = FakeEngine().identity
    assert [row.slice for row in store.rows] == [one.slice for one in slices]
    (found,) = {row.subject for row in store.rows}
    assert (found.task, found.sampling_bucket, found.drafter, found.draft_revision) == (
        "code",
        "greedy",
        "lookup",
        "r7",
    )
    assert (found.target_revision, found.engine) == (identity.target_revision, identity.engine)
    assert (found.host, found.device) == (identity.host, identity.device)
    assert {row.owner for row in store.rows} == {"w1"}


def test_speed_ups_are_computed_at_once_and_then_at_most_every_few_seconds() -> None:
    """No task is forgotten that had slices in between."""
    store, clock = Store(), Clock()
    kept = recorder(store, clock)
    kept.store(slices_of("code"))
    assert store.refreshed == [{"code"}]
    kept.store(slices_of("sql"))
    clock.now_s += REFRESH_EVERY_S / 2
    kept.store(slices_of("chat"))
    assert store.refreshed == [{"code"}]
    clock.now_s += REFRESH_EVERY_S / 2
    kept.store(slices_of("code"))
    assert store.refreshed == [{"code"}, {"sql", "chat", "code"}]
    clock.now_s += REFRESH_EVERY_S
    kept.store([])
    assert len(store.refreshed) == 2
