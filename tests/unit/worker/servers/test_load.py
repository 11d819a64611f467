"""The requests of others at a server: when servers are asked, and what follows for one request's life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeAlias
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import ServerLoad
from alphaloop.errors import AlphaloopError, ReplyInvalid, RequestRefused, ServerSilent
from alphaloop.settings.endpoints import EndpointSettings
from tests.fixtures.simulated import Clock
from worker.servers.client import ServerClient
from worker.servers.counters import LoadWatch
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import endpoint_of
from worker.servers.load import FRESH_S, Flight, Present

NAMES = ("plain", "ngram")
Event: TypeAlias = tuple[str, str, int]  #: what happens where, and with how many
URL = "http://gpu:8000/v1"


class Telling(ServerClient):
    """A client whose server answers as it is told."""

    def __init__(self, endpoint: EndpointSettings) -> None:
        super().__init__(endpoint)
        self.says: int | Exception = 5
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        self.num_asked = 0

    async def page(self, url: str) -> bytes:
        self.num_asked += 1
        if self.meanwhile is not None:
            await self.meanwhile()
        if isinstance(self.says, Exception):
            raise self.says
        return f"vllm:num_requests_running {self.says}\nvllm:num_requests_waiting 0\n".encode()


class World:
    """A fleet of a vanilla and a drafting server; it is asked again at once, and seconds pass when a test says so."""

    def __init__(self, *, drafts: bool = True) -> None:
        self.clock = Clock()
        drafter = DrafterState("ngram", "r1", 4, least_draft_tokens=4) if drafts else None
        endpoint = endpoint_of(URL, "vllm", "m")
        servers = [
            InferenceServer("plain", endpoint, None, 100, 4096),
            InferenceServer("ngram", endpoint, drafter, 100, 4096),
        ]
        self.clients = {one.name: Telling(endpoint) for one in servers}
        self.fleet = Fleet(servers, clock=self.clock, rng=Random(0))
        self.watch = LoadWatch(self.clients, self.fleet, clock=self.clock)

    @property
    def plain(self) -> Telling:
        return self.clients["plain"]

    def told(self, name: str, num_present: int) -> None:
        """One says so of its load, whoever asked."""
        places = self.fleet.members[name].places
        places.reported(Present(num_present, 0), places.num_in_flight)

    def told_both(self, plain: int, ngram: int) -> None:
        self.told("plain", plain)
        self.told("ngram", ngram)

    def turn(self) -> None:
        async def watch() -> None:
            watching = asyncio.create_task(self.watch.run())
            for _ in range(20):
                await asyncio.sleep(0)
            watching.cancel()

        with patch("worker.servers.counters.EVERY_S", 0.0):
            asyncio.run(watch())

    def others(self) -> list[float | None]:
        return [status.num_others for status in self.fleet.statuses()]


def test_what_a_server_has_above_our_own_is_of_others_until_it_tells_again() -> None:
    servers = World()
    servers.told_both(2, 5)
    flight = servers.fleet.began("plain")
    servers.clock.pass_s(1.0)
    servers.told_both(5, 5)  # four of others at plain
    servers.clock.pass_s(1.0)
    other = servers.fleet.began("plain")  # our own are counted at once
    servers.clock.pass_s(2.0)
    landing = servers.fleet.ended(flight)
    assert landing.num_beside == pytest.approx((1 + 1 + 2 * 2) / 4), "ours"
    assert landing.load == ServerLoad(pytest.approx((3 + 5 + 2 * 6) / 4), pytest.approx(5.0), is_whole=True)
    assert servers.fleet.ended(other).load.num_beside == pytest.approx(6.0)


def test_a_server_that_says_too_few_for_a_moment_and_too_many_at_another_is_right_on_average() -> None:
    """A request on its way is not seen there yet, and one that has ended may be seen still."""
    servers = World()
    flights = [servers.fleet.began("plain") for _ in range(4)]
    for num_present in (6, 4, 7, 3):  # of others: 2, 0, 3, -1
        servers.told_both(num_present, 0)
        servers.clock.pass_s(1.0)
    assert servers.fleet.ended(flights[0]).load.num_beside == pytest.approx(4 + 1)


@pytest.mark.parametrize("silent", NAMES)
def test_a_load_that_one_server_told_too_long_ago_is_not_whole(silent: str) -> None:
    servers = World()
    servers.told_both(3, 3)
    first = servers.fleet.began("plain")
    servers.clock.pass_s(FRESH_S - 0.5)
    assert all(status.is_whole_load_known for status in servers.fleet.statuses())
    assert servers.fleet.ended(first).load.is_whole
    second = servers.fleet.began("plain")
    servers.told("plain" if silent == "ngram" else "ngram", 3)
    servers.clock.pass_s(1.0)
    assert {one.name for one in servers.fleet.statuses() if not one.is_whole_load_known} == {silent}
    servers.told_both(3, 3)
    servers.clock.pass_s(1.0)
    assert not servers.fleet.ended(second).load.is_whole, "half a second of it is not known"


events = st.lists(
    st.one_of(
        st.tuples(st.just("began"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("ended"), st.sampled_from(NAMES), st.integers(0, 5)),
        st.tuples(st.just("told"), st.sampled_from(NAMES), st.integers(0, 20)),
        st.tuples(st.just("passes"), st.just(""), st.integers(1, 5_000)),  # ms
    ),
    max_size=60,
)


@given(events)
def test_the_whole_load_is_never_below_our_own(happened: Sequence[Event]) -> None:
    servers, flights = World(), list[Flight]()
    for what, name, number in happened:
        match what:
            case "began":
                flights.append(servers.fleet.began(name))
            case "told":
                servers.told(name, number)
            case "passes":
                servers.clock.pass_s(number / 1000)
            case "ended" if flights:
                flight = flights.pop(number % len(flights))
                landing = servers.fleet.ended(flight)
                assert landing.load.num_beside >= landing.num_beside
                assert landing.num_beside >= 1 - 1e-9, "itself"
                assert landing.load.num_elsewhere >= 0


@given(events)
def test_the_shares_of_all_requests_are_the_time_in_which_their_endpoints_had_one(happened: Sequence[Event]) -> None:
    servers, flights, shared_s, busy_s = World(), list[Flight](), 0.0, 0.0
    for what, name, number in happened:
        match what:
            case "began":
                flights.append(servers.fleet.began(name))
            case "passes":
                servers.clock.pass_s(number / 1000)
                busy_s += number / 1000 * len({flight.endpoint for flight in flights})
            case "ended" if flights:
                shared_s += servers.fleet.ended(flights.pop(number % len(flights))).share_s
    shared_s += sum(servers.fleet.ended(flight).share_s for flight in flights)
    assert shared_s == pytest.approx(busy_s)


def test_a_request_has_an_equal_share_of_each_moment() -> None:
    servers = World()
    first = servers.fleet.began("plain")
    servers.clock.pass_s(3.0)
    second = servers.fleet.began("plain")
    servers.clock.pass_s(1.0)
    assert servers.fleet.ended(first).share_s == pytest.approx(3 + 1 / 2)
    servers.clock.pass_s(2.0)
    assert servers.fleet.ended(second).share_s == pytest.approx(1 / 2 + 2)


def test_servers_are_asked_while_there_are_requests_of_ours_and_a_little_longer() -> None:
    world = World()
    world.turn()
    assert (world.plain.num_asked, world.others()) == (0, [None, None])
    flight = world.fleet.began("plain")
    world.turn()
    assert world.plain.num_asked > 2
    assert world.others() == [4, 5]
    world.fleet.ended(flight)
    num_asked = world.plain.num_asked
    world.clock.pass_s(5.0)
    world.turn()
    assert world.plain.num_asked > num_asked
    num_asked = world.plain.num_asked
    world.clock.pass_s(60.0)
    world.turn()
    assert (world.plain.num_asked, world.others()) == (num_asked, [None, None])


def test_servers_of_one_route_are_not_asked() -> None:
    world = World(drafts=False)
    world.fleet.began("plain")
    world.turn()
    assert world.plain.num_asked == 0


def test_our_own_requests_are_those_between_the_question_and_the_answer() -> None:
    world = World()
    world.fleet.began("plain")

    async def two_more() -> None:
        if world.plain.num_asked == 1:
            world.fleet.began("plain")
            world.fleet.began("plain")
        else:
            await asyncio.Event().wait()

    world.plain.meanwhile = two_more
    world.turn()
    assert world.others()[0] == 5 - (1 + 3) / 2


@pytest.mark.parametrize("error", [RequestRefused("no such page"), ReplyInvalid("no gauges")])
def test_a_server_that_does_not_tell_is_asked_seldom_and_holds_up_no_other(
    error: AlphaloopError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = World()
    world.plain.says = error
    world.fleet.began("plain")
    world.turn()
    assert (world.plain.num_asked, world.others()) == (1, [None, 5])
    assert world.clients["ngram"].num_asked > 2
    assert "plain does not report its load" in caplog.text


def test_a_server_that_was_silent_is_asked_again_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World()
    world.fleet.began("plain")
    world.plain.says = ServerSilent("nothing came")
    world.turn()
    assert world.plain.num_asked > 2
    world.plain.says = 2
    world.turn()
    assert world.others()[0] == 1
    said = [record.getMessage() for record in caplog.records]
    assert said == ["plain does not report its load: nothing came", "plain reports its load"]
