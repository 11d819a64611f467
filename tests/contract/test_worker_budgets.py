"""The exploration budget of a worker over a real PostgreSQL: earned, spent once, and kept for the next worker."""

from __future__ import annotations

import random

import pytest

from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.store.database import Database
from tests.fixtures.deciding_worker import (
    Worker,
    record,
    run,
    unreachable,
)

pytestmark = pytest.mark.postgres


def test_what_was_saved_up_outlives_a_worker_and_is_spent_once(database: Database, rng: random.Random) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    saving = PolicyLimits(explore_share=0.05, control_share=0.0)
    first, second = Worker(database, saving), Worker(database, saving)
    for _ in range(3):
        first.decide("code")
    saved = first.budget()
    assert saved.balance == saved.accrued > 0
    assert Worker(database, saving).budget().balance == pytest.approx(saved.balance)
    # One that runs beside the first spends from the same budget; the first learns of it with its next batch.
    second.store.keep("code", "greedy", second.store.open("code", "greedy").paid(saved.balance))
    first.decide("code")
    left = first.budget()
    assert left.balance == pytest.approx(left.accrued - saved.balance)
    assert left.spent == pytest.approx(saved.balance)


def test_what_is_earned_is_written_from_time_to_time_and_what_is_spent_at_once(
    database: Database, rng: random.Random
) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    limits = PolicyLimits(explore_share=0.05, control_share=0.0)
    worker = Worker(database, limits, accrued_every_s=5.0)

    def stored() -> ExplorationBudget:
        return Worker(database, limits).budget()

    worker.decide("code")
    first = stored().accrued
    assert first > 0
    for _ in range(3):
        worker.decide("code")
    assert stored().accrued == first
    worker.now_s += 5.0
    worker.decide("code")
    assert stored().accrued == pytest.approx(5 * first)
    worker.decide("code")
    assert stored().accrued == pytest.approx(5 * first)
    worker.store.keep("code", "greedy", worker.budget().paid(1.0))
    assert (stored().accrued, stored().spent) == pytest.approx((6 * first, 1.0))


def test_credit_is_written_when_a_worker_ends(database: Database, rng: random.Random) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    limits = PolicyLimits(explore_share=0.05, control_share=0.0)
    worker = Worker(database, limits, accrued_every_s=5.0)
    for _ in range(3):
        worker.decide("code")
    accrued = worker.budget().accrued
    assert Worker(database, limits).budget().accrued == pytest.approx(accrued / 3)
    worker.decider.save()
    assert Worker(database, limits).budget().accrued == pytest.approx(accrued)


def test_a_cold_task_has_its_first_credit_once(database: Database) -> None:
    limits = PolicyLimits(control_share=0.0)
    num_tokens = 100.0
    credit = limits.first_jobs * num_tokens
    for _ in range(3):
        worker = Worker(database, limits)
        worker.decide("code")
        accrued = worker.budget().accrued
        assert credit < accrued < 1.5 * credit


def test_a_budget_that_cannot_be_stored_is_stored_with_the_next_batch(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    limits = PolicyLimits(control_share=0.0)
    worker = Worker(database, limits)
    worker.decide("code")
    with unreachable(monkeypatch) as tries:
        worker.decide("code")
    assert tries
    stored = Worker(database, limits).budget()
    assert stored.accrued < worker.budget().accrued
    worker.decide("code")
    stored = Worker(database, limits).budget()
    assert stored.accrued == pytest.approx(worker.budget().accrued)
