"""A worker or scheduler that ends is started again, later each time, until that has happened too often."""

from __future__ import annotations

import pytest

from alphaloop.cli.services import MOST_STARTS, WINDOW_S, Supervised
from alphaloop.errors import StartFailed


class Supervising:
    """A child that ends whenever the test says so, and what is told of it."""

    def __init__(self, name: str = "worker") -> None:
        self.name = name
        self.code: int | None = None
        self.num_starts = 0
        self.starts = True
        self.now = 0.0
        self.told: list[str] = []
        self.supervised = Supervised(self, self.told.append, clock=lambda: self.now)

    def start(self) -> None:
        self.num_starts += 1
        if not self.starts:
            raise StartFailed("no room")
        self.code = None

    def ended_with(self) -> int | None:
        return self.code

    def failed(self, what: str, *, hint: str | None = None) -> StartFailed:
        return StartFailed(f"{self.name} {what}", hint=hint)

    def die(self, code: int) -> None:
        self.code = code
        self.supervised.look()

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.supervised.look()


def test_an_end_is_told_with_its_reason_and_answered_by_a_new_start() -> None:
    one = Supervising()
    one.pass_by(100)
    one.die(3)
    assert one.told == [
        "the worker ended with code 3 (its engine could decode nothing any more); starting it again in 1 s"
    ]
    one.pass_by(0.5)
    assert one.num_starts == 0
    one.pass_by(0.5)
    assert one.num_starts == 1
    one.die(137)
    assert one.told[-1] == "the worker ended with code 137 (killed by signal 9); starting it again in 2 s"


def test_too_many_ends_are_an_error_and_old_ones_are_forgotten() -> None:
    one = Supervising()
    for _ in range(MOST_STARTS):
        one.die(1)
        one.pass_by(100)
    assert one.num_starts == MOST_STARTS
    one.pass_by(WINDOW_S)
    for _ in range(MOST_STARTS):
        one.die(4)
        one.pass_by(16)
    with pytest.raises(StartFailed, match=r"worker ended with code 4 .*, after 5 new starts within 10 minutes"):
        one.die(4)
    assert one.num_starts == 2 * MOST_STARTS


def test_a_start_that_fails_counts_as_an_end() -> None:
    one = Supervising()
    one.starts = False
    one.die(1)
    one.pass_by(1)
    assert one.told[-1] == "the worker could not be started again: no room; starting it again in 2 s"
    for wait_s in (2, 4, 8):
        one.pass_by(wait_s)
    with pytest.raises(StartFailed, match="could not be started again: no room, after 5 new starts"):
        one.pass_by(16)


def test_a_server_is_called_by_its_name() -> None:
    one = Supervising("PostgreSQL")
    one.die(137)
    assert one.told == ["PostgreSQL ended with code 137 (killed by signal 9); starting it again in 1 s"]
