"""Tests of a server: what they find where it goes away and comes back while one is under way."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from alphaloop.errors import AlphaloopError, ServerFailed, ServerUnreachable
from alphaloop.server_identity import Answer, ServerIdentity
from tests.fixtures.simulated import Clock
from worker.servers import testing
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import endpoint_of

SERVER = InferenceServer("plain", endpoint_of("http://gpu:8000/v1", "vllm", "m"), None, 8, 4096)


class Answering:
    """A client whose server answers when it is told to, with an error if that is so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.error = error

    async def complete(self, *_: object) -> None:
        self.has_asked.set()
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error


def identity(version: str = "0.32.0", text: str = "red") -> ServerIdentity:
    return ServerIdentity(f"vllm-{version}", "m", None, 4096, (Answer(text, {text: -0.1, "green": -3.0}),) * 16)


def outcome_of(
    fleet: Fleet, known: dict[str, ServerIdentity], *, goes_away: bool = False, error: Exception | None = None
) -> AlphaloopError | None:
    """What the test says of a server that may go away while it is under way."""

    async def run() -> AlphaloopError | None:
        client = Answering(error)
        test = testing.Tests(cast(Any, {"plain": client}), fleet, known).begin("plain")
        await client.has_asked.wait()
        if goes_away:
            fleet.failed("plain", ServerUnreachable())
        client.may_answer.set()
        return await test

    return asyncio.run(run())


def now_is(found: ServerIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_identity(*_: object, **__: object) -> ServerIdentity:
        return found

    monkeypatch.setattr("worker.servers.testing.ask_identity", ask_identity)


@pytest.mark.parametrize(
    ("goes_away", "version", "state"),
    [(True, "0.33.0", "retired"), (True, "0.32.0", "starting"), (False, "0.33.0", "up")],
)
def test_a_server_that_was_away_while_it_was_tested_has_to_be_the_same(
    goes_away: bool, version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was never away is not asked what it is: that takes sixteen texts."""
    now_is(identity(version), monkeypatch)
    fleet = Fleet([SERVER], clock=Clock(), rng=Random(0))
    outcome_of(fleet, {"plain": identity()}, goes_away=goes_away)
    assert [status.state for status in fleet.statuses()] == [state]


def test_a_test_that_fails_in_an_unknown_way_is_a_verdict_too() -> None:
    """The endpoint is tested again later, and who waits for the test goes on."""
    clock = Clock()
    fleet = Fleet([SERVER], clock=clock, rng=Random(0))
    assert isinstance(outcome_of(fleet, {}, error=OSError("no processes left")), ServerFailed)
    assert [status.state for status in fleet.statuses()] == ["down"]
    clock.pass_s(60.0)
    assert list(fleet.due_tests()) == ["plain"]


@pytest.mark.parametrize(("late_text", "state"), [("red", "starting"), ("blue", "retired")])
def test_a_server_that_was_away_at_the_start_has_to_have_the_model_of_the_others(
    late_text: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_is(identity(text=late_text), monkeypatch)
    fleet = Fleet([SERVER], clock=Clock(), rng=Random(0))
    fleet.failed("plain", ServerUnreachable())
    outcome_of(fleet, {"other": identity()})
    assert [status.state for status in fleet.statuses()] == [state]
