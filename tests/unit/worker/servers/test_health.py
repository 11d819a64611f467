"""Whose fault a failure was, and which requests run alone because servers died with them.

What tests of a server find where it goes away and comes back while one is under way.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from alphaloop.errors import (
    AlphaloopError,
    InvalidField,
    ModelNotServed,
    PromptTooLong,
    ReplyCut,
    ReplyInvalid,
    RequestKillsServer,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
    ServerUnreachable,
)
from alphaloop.server_identity import Continuation, ServerIdentity
from tests.fixtures.simulated import Clock, server_of
from worker.servers import testing
from worker.servers.fleet import FailureVerdict, Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import endpoint_of

GONE = ServerUnreachable("no connection")


class Three:
    """Three replicas and one job; a second on the clock between two happenings."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.names = ["s0", "s1", "s2"]
        endpoints = [server_of(name, None, 0, 8) for name in self.names]
        self.fleet = Fleet(endpoints, clock=self.clock, rng=Random(0))
        self.verdict: FailureVerdict | None = None

    def test(self, **errors: AlphaloopError) -> None:
        """The tests that are due: those of endpoints in `errors` fail."""
        for name in self.fleet.due_tests():
            self.fleet.tested(name, errors.get(name))

    def heal(self) -> None:
        for _ in range(3):
            self.clock.pass_s(31.0)
            self.test()

    def fail(
        self, name: str, error: AlphaloopError, *, alone: bool = False, **tests: AlphaloopError
    ) -> FailureVerdict | None:
        """The job's request fails there, and then the tests end as `tests` says."""
        flight = self.fleet.began(name, alone=alone)
        self.clock.pass_s(1.0)
        self.fleet.ended(flight)
        self.fleet.failed(name, error)
        if self.fleet.needs_test(flight, error):
            self.test(**tests)
        self.verdict = self.fleet.judge("job", flight, error, tests.get(name))
        if self.verdict is None:
            self.test(**tests)
            self.verdict = self.fleet.judge("job", flight, error, tests.get(name))
        else:
            self.test(**tests)
        return self.verdict

    def dies(self, name: str, *others: str, alone: bool = False) -> FailureVerdict:
        """The server dies with the job, the others are gone with it, and all come back."""
        verdict = self.fail(name, ReplyCut(), alone=alone, **dict.fromkeys((name, *others), GONE))
        assert verdict is not None
        self.heal()
        return verdict


@pytest.mark.parametrize("error", [PromptTooLong(), RequestRefused(), InvalidField()])
def test_a_request_that_is_refused_is_its_jobs_fault_for_good(error: AlphaloopError) -> None:
    assert Three().fail("s0", error) == FailureVerdict("blame", error, is_final=True)


@pytest.mark.parametrize("error", [ServerUnreachable(), ServerBusy(), ServerLoginRefused(), ModelNotServed()])
def test_nothing_is_said_against_a_job_that_no_server_worked_on(error: AlphaloopError) -> None:
    three = Three()
    for _ in range(50):
        assert three.fail("s0", error) == FailureVerdict("again", error)
        three.heal()


@pytest.mark.parametrize("error", [ServerFailed(), ReplyInvalid()])
def test_what_a_healthy_server_says_of_a_job_is_blamed_the_second_time(error: AlphaloopError) -> None:
    three = Three()
    assert three.fail("s0", error) == FailureVerdict("again", error, avoid=frozenset({"s0"}))
    assert three.fail("s1", error) == FailureVerdict("blame", error)


@pytest.mark.parametrize("error", [ReplyCut(), ServerSilent()])
def test_what_is_lost_though_servers_are_well_is_tried_alone_and_blamed_the_third_time(error: AlphaloopError) -> None:
    three = Three()
    assert three.fail("s0", error) == FailureVerdict("again", error, avoid=frozenset({"s0"}))
    assert three.fail("s1", error) == FailureVerdict("alone", error, avoid=frozenset({"s0", "s1"}))
    assert three.fleet.suspects().num_alone == 1
    assert three.fail("s2", error, alone=True) == FailureVerdict("blame", error)
    three.fleet.suspicion.forget("job")
    assert three.fleet.suspects().num_alone == 0


@pytest.mark.parametrize("test", [ServerLoginRefused(), ModelNotServed(), ReplyInvalid()])
def test_a_server_that_is_wrong_for_all_says_nothing_against_a_job(test: AlphaloopError) -> None:
    three = Three()
    for name in three.names:
        verdict = three.fail(name, ServerFailed(), **{name: test})
        assert (verdict.action, verdict.avoid) == ("again", frozenset())


def test_a_request_that_kills_servers_runs_alone_and_is_then_blamed_for_good() -> None:
    three = Three()
    suspicion = three.fleet.suspicion
    assert suspicion.standing("job") is None
    assert three.dies("s0").action == "again"
    verdict = three.dies("s1")
    assert suspicion.standing("job").action == "alone", "also if it leaves and comes back"
    assert (verdict.action, verdict.avoid) == ("alone", frozenset()), (
        "those have just started, and are the better for it"
    )
    verdict = three.dies("s0", alone=True)
    assert (verdict.action, verdict.avoid) == ("alone", frozenset({"s0"}))
    verdict = three.dies("s2", alone=True)
    assert (verdict.action, verdict.is_final) == ("blame", True)
    assert isinstance(verdict.error, RequestKillsServer)
    assert verdict.error.message == "2 times a server died while it worked on this request alone: s0, s2"
    suspicion.forget("job")
    assert suspicion.standing("job") is None


def test_a_proxy_that_answers_for_a_dead_server_does_not_hide_who_killed_it() -> None:
    three, error = Three(), ServerUnavailable("the server answered 502")
    verdicts = []
    for name, alone in (("s0", False), ("s1", False), ("s2", True), ("s0", True)):
        verdicts.append(three.fail(name, error, alone=alone, **{name: error}))
        three.heal()
    assert [verdict and verdict.action for verdict in verdicts] == ["again", "alone", "alone", "blame"]


def test_an_outage_of_all_counts_against_nobody_until_it_has_followed_the_job_again_and_again() -> None:
    three = Three()
    assert [three.dies(*three.names).action for _ in range(11)] == ["again"] * 10 + ["alone"]
    assert [three.dies("s1", "s0", "s2", alone=True).action for _ in range(2)] == ["alone", "alone"]
    verdict = three.dies("s2", "s0", "s1", alone=True)
    assert (verdict.action, verdict.is_final) == ("blame", False)


def test_a_death_alone_is_judged_once_the_other_servers_are_known_to_be_well() -> None:
    three = Three()
    three.dies("s0")
    three.dies("s1")
    flight = three.fleet.began("s2", alone=True)
    three.clock.pass_s(1.0)
    three.fleet.ended(flight)
    three.fleet.failed("s2", ReplyCut())
    assert three.fleet.due_tests() == ("s2",)
    three.fleet.tested("s2", GONE)
    assert three.fleet.judge("job", flight, ReplyCut(), GONE) is None
    assert set(three.fleet.due_tests()) == {"s0", "s1"}
    three.fleet.tested("s0", GONE)
    assert three.fleet.judge("job", flight, ReplyCut(), GONE) is None
    three.fleet.tested("s1", None)
    verdict = three.fleet.judge("job", flight, ReplyCut(), GONE)
    assert verdict.action == "alone"


def test_a_suspect_avoids_servers_that_die_without_it() -> None:
    three = Three()
    for _ in range(2):
        three.fleet.failed("s2", ServerFailed())
        three.test(s2=GONE)
        three.heal()
    three.dies("s0")
    assert three.dies("s1").avoid == frozenset({"s2"})


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
    return ServerIdentity(f"vllm-{version}", "m", None, 4096, (Continuation(text, {text: -0.1, "green": -3.0}),) * 16)


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
