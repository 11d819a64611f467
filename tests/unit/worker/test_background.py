"""Writes in the background: in order, waited for while the database is away, and never in the way of decoding."""

from __future__ import annotations

import logging

import pytest

from alphaloop.errors import StoreError, StoreUnavailable
from worker.background import BackgroundWrites


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    """Another test may have raised the level of all logs."""
    caplog.set_level(logging.WARNING, logger="worker.background")


def test_while_the_database_is_away_writes_wait_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    pauses: list[float] = []
    is_away = True

    def write(name: str) -> None:
        if is_away and name == "second":
            raise StoreUnavailable
        done.append(name)

    background = BackgroundWrites(pauses.append)
    for name in ("first", "second", "third"):
        background.put(name, lambda name=name: write(name))
    background.turn(0.01)
    assert (done, len(background), pauses) == (["first"], 2, [0.01])
    assert "second: not written yet" in caplog.text
    is_away = False
    background.turn(0.0)
    assert done == ["first", "second", "third"]


def test_a_write_that_postgres_refuses_is_logged_and_the_next_one_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def refuse() -> None:
        raise StoreError("no such table")

    background = BackgroundWrites(lambda seconds: None)
    background.put("costs", refuse)
    background.put("choice", lambda: done.append("choice"))
    background.turn(0.0)
    assert done == ["choice"]
    assert "costs: not written: no such table" in caplog.text


def test_too_many_writes_that_wait_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    background = BackgroundWrites(lambda seconds: None)
    for number in range(1001):
        background.put("a number", lambda number=number: done.append(number))
    assert "too many writes wait" in caplog.text
    background.turn(0.0)
    assert done == list(range(1000))
