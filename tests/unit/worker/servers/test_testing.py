"""Tests of a server: what they find where it goes away and comes back while one is under way."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from alphaloop.errors import ServerFailed, ServerUnreachable
from alphaloop.server_identity import Answer, ServerIdentity
from tests.fixtures.simulated import Clock
from worker.servers import testing
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import Endpoint

ENDPOINT = Endpoint("http://gpu:8000/v1", "vllm", "m")
KNOWN = ServerIdentity("vllm-0.32.0", "m", None, 4096, ())


class Answering:
    """A client whose server answers when it is told to."""

    def __init__(self) -> None:
        self.has_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def complete(self, *_: object) -> None:
        self.has_asked.set()
        await self.may_answer.wait()


@pytest.mark.parametrize(
    ("goes_away", "version", "state"),
    [
        (True, "0.33.0", "retired"),
        (True, "0.32.0", "starting"),
        (False, "0.33.0", "up"),
    ],
)
def test_a_server_that_was_away_while_it_was_tested_has_to_be_the_same(
    goes_away: bool, version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was never away is not asked what it is: that takes sixteen texts."""

    async def ask_identity(*_: object, **__: object) -> ServerIdentity:
        return ServerIdentity(f"vllm-{version}", "m", None, 4096, ())

    monkeypatch.setattr("worker.servers.testing.ask_identity", ask_identity)
    server = InferenceServer("plain", ENDPOINT, None, 8, 4096)
    fleet = Fleet([server], clock=Clock(), rng=Random(0))

    async def run() -> None:
        client = Answering()
        tests = testing.Tests(cast(Any, {"plain": client}), fleet, {"plain": KNOWN})
        test = tests.begin("plain")
        await client.has_asked.wait()
        if goes_away:
            fleet.failed("plain", ServerUnreachable())
        client.may_answer.set()
        await test

    asyncio.run(run())
    (found,) = fleet.statuses()
    assert found.state == state


def test_a_test_that_fails_in_an_unknown_way_is_a_verdict_too() -> None:
    """The endpoint is tested again later, and who waits for the test goes on."""

    class Broken:
        async def complete(self, *_: object) -> None:
            raise OSError("no processes left")

    clock, server = Clock(), InferenceServer("plain", ENDPOINT, None, 8, 4096)
    fleet = Fleet([server], clock=clock, rng=Random(0))

    async def found() -> object:
        return await testing.Tests(cast(Any, {"plain": Broken()}), fleet, {}).begin("plain")

    assert isinstance(asyncio.run(found()), ServerFailed)
    assert [status.state for status in fleet.statuses()] == ["down"]
    clock.pass_s(60.0)
    assert list(fleet.due_tests()) == ["plain"]


@pytest.mark.parametrize(("late_text", "state"), [("red", "starting"), ("blue", "retired")])
def test_a_server_that_was_away_at_the_start_has_to_have_the_model_of_the_others(
    late_text: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(text: str) -> ServerIdentity:
        return ServerIdentity("vllm-0.32.0", "m", None, 4096, (Answer(text, {text: -0.1, "green": -3.0}),) * 16)

    async def ask_identity(*_: object, **__: object) -> ServerIdentity:
        return identity(late_text)

    class Well:
        async def complete(self, *_: object) -> None: ...

    monkeypatch.setattr("worker.servers.testing.ask_identity", ask_identity)
    server = InferenceServer("late", ENDPOINT, None, 8, 4096)
    fleet = Fleet([server], clock=Clock(), rng=Random(0))
    fleet.failed("late", ServerUnreachable())

    async def run() -> None:
        known = {"other": identity("red")}
        await testing.Tests(cast(Any, {"late": Well()}), fleet, known).begin("late")

    asyncio.run(run())
    (found,) = fleet.statuses()
    assert found.state == state
