"""Signing in to the console."""

from __future__ import annotations

import base64

import pytest
from pydantic import SecretStr

from alphaloop.console.sessions import LIFETIME_S, MAX_FAILURES, WINDOW_S, Sessions, TooManyFailures
from alphaloop.settings import ConsoleSettings
from tests.fixtures.simulated import Clock


def made(clock: Clock) -> Sessions:
    return Sessions(ConsoleSettings(password=SecretStr("lövelace")), clock=clock)


def header(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def test_a_session_lasts_until_its_hours_are_over() -> None:
    clock = Clock()
    sessions = made(clock)
    one, two = sessions.sign_in("alphaloop", "lövelace"), sessions.sign_in("alphaloop", "lövelace")
    assert one.cookie != two.cookie
    assert sessions.of_cookie(one.cookie) == one
    clock.pass_s(LIFETIME_S + 1)
    assert sessions.of_cookie(one.cookie) is None


@pytest.mark.parametrize(
    "given", ["Basic !", "Bearer x", "", None, header("alphaloop"), header("alphaloop:"), header("eva:lövelace")]
)
def test_other_headers_are_refused(given: str | None) -> None:
    assert made(Clock()).of_header(given) is None


def test_passwords_cannot_be_guessed_quickly() -> None:
    clock = Clock()
    sessions = made(clock)
    for number in range(MAX_FAILURES):
        assert sessions.sign_in("alphaloop", f"guess {number}") is None
    with pytest.raises(TooManyFailures):
        sessions.sign_in("alphaloop", "lövelace")
    clock.pass_s(WINDOW_S + 1)
    assert sessions.sign_in("alphaloop", "lövelace") is not None


def test_without_a_password_nobody_can_sign_in() -> None:
    sessions = Sessions(ConsoleSettings())
    assert not sessions.are_needed
    assert sessions.sign_in("alphaloop", "") is None
