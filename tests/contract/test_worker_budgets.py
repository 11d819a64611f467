"""The exploration budget of a worker over a real PostgreSQL: earned, spent once, and kept for the next worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from alphaloop.deciding.exploration import FIRST_JOBS, ExplorationBudget
from alphaloop.store.database import Database
from alphaloop.store.decisions import BudgetStore, BudgetSums
from tests.fixtures.deciding_worker import Worker, asked, record, run, unreachable
from worker.deciding.decider import FirstReads

pytestmark = pytest.mark.postgres


def test_what_was_saved_up_outlives_a_worker_and_is_spent_once(database: Database, rng: random.Random) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    saving = 0.05
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
    share = 0.05
    worker = Worker(database, share, accrued_every_s=5.0)

    def stored() -> ExplorationBudget:
        return Worker(database, share).budget()

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
    worker.decider.session.save()
    assert stored().accrued == pytest.approx(6 * first), "when a worker ends"
    worker.decide("code")
    worker.store.keep("code", "greedy", worker.budget().paid(1.0))
    assert (stored().accrued, stored().spent) == pytest.approx((7 * first, 1.0))


def test_a_cold_task_has_its_first_credit_once(database: Database) -> None:
    share = 0.02
    num_tokens = 100.0
    credit = FIRST_JOBS * num_tokens
    for _ in range(3):
        worker = Worker(database, share)
        worker.decide("code")
        accrued = worker.budget().accrued
        assert credit < accrued < 1.5 * credit


class Later:
    """Takes writes as a queue does, and does them when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def __call__(self, what: str, act: Callable[[], object]) -> None:
        self.waiting.append(act)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def test_two_workers_that_write_later_lose_no_credit_and_no_spending(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions, writes, and a database that is away, in any order."""
    accrued, spent, credits = 0.0, 0.0, [1.0, 2.0, 4.0]
    later = [Later(), Later()]
    workers = [Worker(database, accrued_every_s=3.0, write=one) for one in later]
    budgets = [worker.store.open("code", "greedy") for worker in workers]
    for _ in range(400):
        number = rng.randrange(2)
        if rng.random() < 0.6:
            workers[number].now_s += 1.0
            credit, paid = rng.choice(credits), rng.choice([0.0, 0.0, 0.5])
            accrued, spent = accrued + credit, spent + paid
            before = budgets[number]
            changed = replace(before, balance=before.balance + credit, accrued=before.accrued + credit).paid(paid)
            budgets[number] = workers[number].store.keep("code", "greedy", changed)
        elif rng.random() < 0.3:
            with unreachable(monkeypatch):
                later[number].run()
        else:
            later[number].run()
    for number in (0, 1, 0):  # the last time, the first one sees what the other wrote
        accrued, before = accrued + 1.0, budgets[number]
        changed = replace(before, balance=before.balance + 1.0, accrued=before.accrued + 1.0)
        budgets[number] = workers[number].store.save("code", "greedy", changed)
        later[number].run()
    seen = workers[0].store.keep("code", "greedy", budgets[0])
    assert (seen.accrued, seen.spent, seen.balance) == (accrued, spent, accrued - spent)
    stored = Worker(database).store.open("code", "greedy")
    assert (stored.accrued, stored.spent, stored.balance) == (accrued, spent, accrued - spent)


def test_a_decision_between_a_write_and_its_end_counts_once(database: Database) -> None:
    later = Later()
    worker = Worker(database, write=later)
    store, first = worker.store, worker.store.open("code", "greedy")
    held = [store.keep("code", "greedy", replace(first, balance=8.0, accrued=8.0))]

    def decide_meanwhile(budgets: BudgetStore, *args: Any) -> BudgetSums:
        held.append(store.keep("code", "greedy", held[-1].paid(1.0)))
        return add(budgets, *args)

    add = BudgetStore.add
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BudgetStore, "add", decide_meanwhile)
        later.waiting.pop(0)()
        later.waiting.pop(0)()
    assert [(one.balance, one.spent) for one in held] == [(8.0, 0.0), (7.0, 1.0), (6.0, 2.0)]
    found = store.keep("code", "greedy", held[-1])
    assert (found.balance, found.accrued, found.spent) == (6.0, 8.0, 2.0)
    later.run()
    assert Worker(database).store.open("code", "greedy").spent == 2.0


def test_a_database_that_is_away_is_read_when_it_is_back(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(database)
    reads = FirstReads(worker.choices.last_choice, worker.store.prepare)
    key, _ = asked("code", 1)
    with unreachable(monkeypatch) as tries:
        reads.prepare([key])
        assert len(tries) == 1
    reads.prepare([key])
    with unreachable(monkeypatch) as tries:
        worker.budget()
    assert not tries
