"""A thread beside the loop: it turns until it is told to end, and `check` raises its error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from alphaloop.errors import StoreUnavailable, WorkerThreadDied
from worker.background import BackgroundThread

WAIT_S = 10.0


@contextmanager
def turning(turn: Callable[[], object]) -> Iterator[BackgroundThread]:
    neighbour = BackgroundThread("one", turn)
    neighbour.start()
    try:
        yield neighbour
    finally:
        assert neighbour.end(WAIT_S)


class DyingTurn:
    """Turns once, and dies of `error` in its second turn."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.num_turns = 0

    def __call__(self) -> None:
        self.num_turns += 1
        if self.num_turns == 2:
            raise self._error


@pytest.mark.parametrize(
    ("error", "told", "says"),
    [
        (StoreUnavailable("nobody answers"), StoreUnavailable, "nobody answers"),
        (ZeroDivisionError("by zero"), WorkerThreadDied, "the thread one ended: ZeroDivisionError$"),
    ],
)
def test_a_death_is_told_to_whoever_checks_and_wakes_who_waits(
    error: Exception, told: type[Exception], says: str
) -> None:
    died = threading.Event()
    turn = DyingTurn(error)
    neighbour = BackgroundThread("one", turn, on_failure=died.set)
    neighbour.check()
    neighbour.start()
    assert died.wait(WAIT_S)
    for _ in range(2):
        with pytest.raises(told, match=says):
            neighbour.check()
    assert neighbour.end(WAIT_S)
    assert turn.num_turns == 2


def test_the_turn_in_hand_is_the_last_one() -> None:
    turns, is_turning, may_go_on = [], threading.Event(), threading.Event()

    def turn() -> None:
        is_turning.set()
        assert may_go_on.wait(WAIT_S)
        turns.append(None)

    with turning(turn) as neighbour:
        assert is_turning.wait(WAIT_S)
        assert not neighbour.end(0.0)
        may_go_on.set()
        assert neighbour.end(WAIT_S)
        neighbour.check()
    assert len(turns) == 1


def test_one_that_never_started_ends_at_once() -> None:
    assert BackgroundThread("one", lambda: None).end(0.0)
