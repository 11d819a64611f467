"""Leases are renewed, cancellations noticed, and a database that is away is survived."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import pytest

from alphaloop.errors import StoreUnavailable
from worker.jobs.leases import LeaseKeeper


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


def test_held_claims_are_renewed_until_let_go() -> None:
    store = LedgerOfLeases()
    keeper = LeaseKeeper(store, owner="w", lease_s=30)
    keeper.renew_once()
    keeper.hold({"a": 1, "b": 3})
    keeper.renew_once()
    keeper.let_go(["a"])
    keeper.renew_once()
    assert store.renewed == [{"a": 1, "b": 3}, {"b": 3}]


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


def test_a_database_that_is_away_costs_nothing_but_a_renewal() -> None:
    store = LedgerOfLeases()
    keeper = LeaseKeeper(store, owner="w", lease_s=30)
    keeper.hold({"a": 1})
    store.is_away = True
    keeper.renew_once()
    store.is_away = False
    keeper.renew_once()
    assert store.renewed == [{"a": 1}]


def test_while_the_worker_hangs_its_claims_run_out() -> None:
    store, hangs = LedgerOfLeases(), [True]
    keeper = LeaseKeeper(store, owner="w", lease_s=30, may_renew=lambda: not hangs)
    keeper.hold({"a": 1})
    keeper.renew_once()
    assert store.renewed == []
    hangs.clear()
    keeper.renew_once()
    assert store.renewed == [{"a": 1}]


def test_the_thread_renews_by_itself_and_ends() -> None:
    store = LedgerOfLeases()
    keeper = LeaseKeeper(store, owner="w", lease_s=0.03)
    keeper.hold({"a": 1})
    keeper.start()
    assert store.was_renewed.wait(10)
    keeper.close()
    num_renewed = len(store.renewed)
    keeper.renew_once()
    assert len(store.renewed) == num_renewed + 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_by_an_error_of_ours_is_told() -> None:
    class Tripping(LedgerOfLeases):
        def cancelled(self, job_ids: Collection[str]) -> set[str]:
            raise ZeroDivisionError

    keeper = LeaseKeeper(Tripping(), owner="w", lease_s=0.01)
    assert not keeper.has_died
    keeper.hold({"a": 1})
    keeper.start()
    keeper._thread.join(5)
    assert keeper.has_died
