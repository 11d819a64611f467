"""Figures that take long to read are shown as they were read last."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from alphaloop.console.reading import Remembered
from alphaloop.errors import StoreUnavailable
from tests.fixtures.simulated import Clock
from tests.fixtures.worker import until

WAIT_S = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def remembered(clock: Clock) -> Iterator[Remembered]:
    made = Remembered(5.0, clock=clock, patience_s=WAIT_S)
    yield made
    made.close()


def test_the_first_reading_is_waited_for_and_later_ones_are_not_repeated(remembered: Remembered, clock: Clock) -> None:
    readings = iter(range(10))
    assert remembered.get("a", lambda: next(readings)).value == 0
    clock.now_s = 4.9
    assert remembered.get("a", lambda: next(readings)).value == 0
    assert remembered.get("b", lambda: next(readings)).value == 1


def test_an_old_value_is_shown_while_a_new_one_is_read(remembered: Remembered, clock: Clock) -> None:
    assert remembered.get("a", lambda: 1).value == 1
    may_end = threading.Event()

    def slow() -> int:
        assert may_end.wait(WAIT_S)
        return 2

    clock.now_s = 6.0
    assert remembered.get("a", slow).value == 1
    assert remembered.get("a", slow).value == 1, "a second one is not started beside it"
    may_end.set()
    until(lambda: remembered.get("a", slow).value == 2, "the new value is read")


def test_nobody_waits_longer_than_the_patience(clock: Clock) -> None:
    made, may_end = Remembered(5.0, clock=clock, patience_s=0.0), threading.Event()
    try:
        found = made.get("a", lambda: may_end.wait(WAIT_S))
        assert (found.value, found.read_at, found.error) == (None, None, None)
    finally:
        may_end.set()
        made.close()


def test_a_failure_is_told_in_words_and_the_last_value_stays(remembered: Remembered, clock: Clock) -> None:
    assert remembered.get("a", lambda: 1).value == 1

    def fails() -> int:
        raise StoreUnavailable("the database is away")

    clock.now_s = 6.0
    until(lambda: remembered.get("a", fails).error == "the database is away", "the failure is known")
    assert remembered.get("a", fails).value == 1


def test_of_a_foreign_failure_only_the_class_is_told(remembered: Remembered) -> None:
    def fails() -> int:
        raise ValueError("a prompt")

    assert remembered.get("a", fails).error == "ValueError"


def test_what_takes_long_is_read_seldom(remembered: Remembered, clock: Clock) -> None:
    readings = iter(range(10))

    def slow() -> int:
        clock.pass_s(4.0)
        return next(readings)

    assert remembered.get("a", slow).value == 0
    clock.pass_s(19.0)
    assert remembered.get("a", slow).value == 0, "five times as long as the reading took"
    clock.pass_s(2.0)
    until(lambda: remembered.get("a", slow).value == 1, "it is read anew")


def test_what_was_forgotten_is_read_anew(remembered: Remembered) -> None:
    readings = iter(range(10))
    assert remembered.get("a", lambda: next(readings)).value == 0
    remembered.forget("a")
    assert remembered.get("a", lambda: next(readings)).value == 1
