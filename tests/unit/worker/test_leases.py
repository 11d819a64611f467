"""Leases are renewed, cancellations noticed, and a database that is away is survived."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import pytest

from alphaloop.errors import StoreUnavailable
from tests.fixtures.worker import until
from worker.claims import LeaseKeeper


class LedgerOfLeases:
    def __init__(self) -> None:
        self.renewed: list[dict[str, int]] = []
        self.lost: set[str] = set()
        self.asked_to_end: set[str] = set()
        self.is_away = False
        self.was_renewed = threading.Event()

    def renew(self, attempts: Mapping[str, int], *, owner: str, lease_s: float) -> set[str]:
        if self.is_away:
            raise StoreUnavailable
        self.renewed.append(dict(attempts))
        self.was_renewed.set()
        return set(attempts) - self.lost

    def cancelled(self, job_ids: Collection[str]) -> set[str]:
        return self.asked_to_end & set(job_ids)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_claim_is_renewed_when_half_of_its_lease_is_over_and_not_before() -> None:
    store, clock = LedgerOfLeases(), Clock()
    keeper = LeaseKeeper(store, owner="w", lease_s=30, clock=clock)
    keeper.hold({"a": 1, "b": 3})
    for _ in range(14):
        clock.now += 1
        keeper.renew_due()
    assert store.renewed == [], "most jobs end before: their rows are never written for a lease"
    keeper.hold({"later": 1})
    for _ in range(29):
        clock.now += 1
        keeper.renew_due()
    assert store.renewed == [{"a": 1, "b": 3}, {"later": 1}, {"a": 1, "b": 3}]


def test_claims_are_renewed_until_let_go() -> None:
    store, clock = LedgerOfLeases(), Clock()
    keeper = LeaseKeeper(store, owner="w", lease_s=30, clock=clock)
    keeper.renew_due()
    keeper.hold({"a": 1, "b": 3})
    keeper.let_go(["a"])
    clock.now += 15
    keeper.renew_due()
    assert store.renewed == [{"b": 3}]


def test_a_job_that_is_claimed_again_is_renewed_with_its_new_attempt() -> None:
    store, clock = LedgerOfLeases(), Clock()
    keeper = LeaseKeeper(store, owner="w", lease_s=30, clock=clock)
    keeper.hold({"a": 1})
    clock.now += 10
    keeper.hold({"a": 2})
    clock.now += 10
    keeper.renew_due()
    clock.now += 5
    keeper.renew_due()
    assert store.renewed == [{"a": 2}]


def test_a_lost_claim_is_not_asked_for_every_second() -> None:
    store, clock = LedgerOfLeases(), Clock()
    keeper = LeaseKeeper(store, owner="w", lease_s=30, clock=clock)
    keeper.hold({"a": 1})
    store.lost = {"a"}
    for _ in range(29):
        clock.now += 1
        keeper.renew_due()
    assert len(store.renewed) == 1


def test_cancellations_are_known_while_held_and_forgotten_after() -> None:
    store = LedgerOfLeases()
    keeper = LeaseKeeper(store, owner="w", lease_s=30)
    keeper.hold({"a": 1, "b": 1})
    store.asked_to_end = {"b", "somebody else's"}
    keeper.check_cancelled()
    keeper.cancel("somebody else's")
    assert keeper.cancelled() == {"b"}
    keeper.let_go(["b"])
    assert keeper.cancelled() == set()


def test_a_database_that_is_away_is_asked_again_until_it_answers() -> None:
    store, clock = LedgerOfLeases(), Clock()
    keeper = LeaseKeeper(store, owner="w", lease_s=30, clock=clock)
    keeper.hold({"a": 1})
    store.is_away = True
    clock.now += 15
    keeper.renew_due()
    store.is_away = False
    clock.now += 1
    keeper.renew_due()
    assert store.renewed == [{"a": 1}]


def test_while_the_worker_hangs_its_claims_run_out() -> None:
    store, hangs, clock = LedgerOfLeases(), [True], Clock()
    keeper = LeaseKeeper(store, owner="w", lease_s=30, may_renew=lambda: not hangs, clock=clock)
    keeper.hold({"a": 1})
    clock.now += 20
    keeper.renew_due()
    assert store.renewed == []
    hangs.clear()
    keeper.renew_due()
    assert store.renewed == [{"a": 1}]


def test_the_thread_renews_by_itself_and_ends() -> None:
    store = LedgerOfLeases()
    keeper = LeaseKeeper(store, owner="w", lease_s=0.03)
    keeper.hold({"a": 1})
    keeper.start()
    assert store.was_renewed.wait(10)
    keeper.close()
    assert not keeper.has_died


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_by_an_error_of_ours_is_told() -> None:
    class Tripping(LedgerOfLeases):
        def cancelled(self, job_ids: Collection[str]) -> set[str]:
            raise ZeroDivisionError

    keeper = LeaseKeeper(Tripping(), owner="w", lease_s=0.01)
    assert not keeper.has_died
    keeper.hold({"a": 1})
    keeper.start()
    until(lambda: keeper.has_died, "the thread has ended", 30)
    assert keeper.has_died
