"""What failed for want of a server is repeated; everything else is not."""

from __future__ import annotations

import threading

import pytest

from alphaloop.errors import BrokerUnavailable, DeliveryFailed, StoreError, StoreUnavailable
from worker import background as retry
from worker.background import Retry


class InstantEvent(threading.Event):
    """An event that waits for nobody, and remembers for how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return self.is_set()


@pytest.mark.parametrize("error", [StoreUnavailable, BrokerUnavailable, DeliveryFailed])
def test_a_missing_server_is_waited_for(error: type[Exception]) -> None:
    hurry, failures = InstantEvent(), [error()] * 9

    def act() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert Retry(hurry).until_done("record", act) == "done"
    assert len(hurry.waits) == 9
    assert hurry.waits == sorted(hurry.waits)
    assert hurry.waits[-1] == retry.LONGEST_WAIT_S


def test_in_a_hurry_the_error_comes_out() -> None:
    hurry = InstantEvent()
    hurry.set()

    def act() -> None:
        raise StoreUnavailable

    with pytest.raises(StoreUnavailable):
        Retry(hurry).until_done("record", act)
    assert hurry.waits == []


def test_a_refused_statement_is_not_repeated() -> None:
    calls = []

    def act() -> None:
        calls.append(1)
        raise StoreError("column does not exist")

    with pytest.raises(StoreError):
        Retry(InstantEvent()).until_done("record", act)
    assert calls == [1]


def test_for_a_while_a_hurry_changes_nothing_and_the_limit_ends_it() -> None:
    hurry, seconds = threading.Event(), [0.0]
    hurry.set()
    calls = []

    def pause(for_s: float) -> None:
        seconds[0] += for_s

    def act() -> None:
        calls.append(seconds[0])
        raise StoreUnavailable

    with pytest.raises(StoreUnavailable):
        Retry(hurry, pause=pause, clock=lambda: seconds[0]).for_a_while("release", act, 5.0)
    assert calls[-2] < 5.0 <= calls[-1]
    assert len(calls) > 3
