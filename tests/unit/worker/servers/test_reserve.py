"""A reserve keeps places of a server free for other clients: the rule, what a fleet makes of it, and what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from alphaloop.engine import HeldRequests
from alphaloop.errors import RequestRefused, ServerUnreachable
from alphaloop.settings.endpoints import EndpointSettings
from tests.fixtures.simulated import Clock, server_of
from worker.servers.client import ServerClient
from worker.servers.counters import LoadWatch
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.load import FRESH_S, PEAK_S, Flight, LoadSums, Places, Present, most_beside

MOST = 16
URL = "http://gpu:8000/v1"


@pytest.mark.parametrize(
    ("num_kept", "num_others", "others_wait", "expected"),
    [
        (4, 0, False, 12),
        (4, 5, False, 7),
        (4, 12, False, 0),
        (4, 40, False, 0),
        (4, 1, True, 0),
        (4, None, False, 0),
        (15, 0, False, 1),
        (15, 1, False, 0),
    ],
    ids=["nobody else", "some", "all but the reserve", "more than all", "one waits", "not known", "one place", "taken"],
)
def test_what_is_left_of_a_server(num_kept: int, num_others: int | None, others_wait: bool, expected: int) -> None:
    assert most_beside(MOST, num_kept, num_others, others_wait=others_wait) == expected


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 200))
def test_what_is_left_never_reaches_into_the_reserve(most: int, num_kept: int, num_others: int) -> None:
    ours = most_beside(most, num_kept, num_others)
    assert ours >= 0
    assert ours == 0 or ours + num_others + num_kept == most


class Endpoint:
    """The places of one endpoint whose server reports what a test says."""

    def __init__(self, num_kept: int = 4) -> None:
        self.clock = Clock()
        self.places = Places(MOST, num_kept=num_kept, clock=self.clock, rng=Random(0))
        self.flights: list[Flight] = []

    def reports(self, others: int, *, waiting: int = 0, after_s: float = 0.5) -> None:
        """Of the others, and what waits there in all."""
        self.clock.pass_s(after_s)
        num = others + self.places.num_texts
        self.places.reported(Present(num - waiting, waiting), self.places.num_texts)

    def send(self, num_texts: int = 1) -> None:
        self.flights.append(self.places.add("plain", LoadSums(), is_alone=False, num_texts=num_texts))

    def fill(self) -> int:
        """Send what may be sent; how many that is."""
        num_before = len(self.flights)
        while self.places.has_room:
            self.send()
        return len(self.flights) - num_before

    def end(self, num: int = 1) -> None:
        for _ in range(num):
            self.places.remove(self.flights.pop(), LoadSums())


def test_ours_give_way_as_they_end_and_come_back_when_others_have_left() -> None:
    server = Endpoint()
    server.reports(0)
    assert server.fill() == 12
    server.reports(10)
    assert (server.places.limit, server.fill()) == (2, 0), "what runs goes on"
    assert server.places.num_in_flight == 12
    server.end(10)
    assert server.fill() == 0
    assert server.places.held == "held for others: 4 of 16 places are free, 4 stay free"
    server.end()
    assert server.fill() == 1
    server.reports(0)
    assert server.fill() == 0, "a moment may lie between two bursts"
    server.reports(0, after_s=PEAK_S)
    assert server.fill() == 10


def test_a_peak_counts_at_once_and_bursts_let_nothing_in_between_them() -> None:
    server = Endpoint()
    server.reports(8)
    assert server.fill() == 4
    for others in (0, 8, 0, 0, 8, 0):
        server.reports(others)
        server.end()
        assert server.fill() == 1, "one for one"
    server.reports(9)
    server.end()
    assert server.fill() == 0


def test_a_report_that_came_with_a_burst_of_ours_does_not_hide_others() -> None:
    """What was sent a moment ago is counted here and not there yet."""
    server = Endpoint()
    server.reports(3)
    assert server.fill() == 9
    server.clock.pass_s(0.5)
    server.places.reported(Present(3 + 4, 0), server.places.num_texts)  # five are on their way
    assert server.fill() == 0


def test_nothing_new_is_sent_while_others_wait() -> None:
    server = Endpoint()
    server.reports(3)
    for _ in range(4):
        server.send()
    server.reports(3, waiting=2)
    assert server.places.has_room, "those of ours that were sent since the last report may be the ones that wait"
    server.reports(3, waiting=2)
    assert (server.fill(), server.places.limit) == (0, 0)
    assert server.places.held == "held for others: 2 requests wait at the server"
    server.reports(3)
    assert server.fill() == 5


def test_ours_may_wait_where_there_are_no_others() -> None:
    server = Endpoint()
    server.reports(0)
    for _ in range(4):
        server.send()
    server.reports(0)
    server.reports(0, waiting=3)
    assert server.fill() == 8


def test_nothing_is_sent_while_the_load_is_not_known() -> None:
    server = Endpoint()
    assert server.fill() == 0
    assert server.places.held == "held: the server has not reported its load yet"
    server.reports(0)
    assert server.fill() == 12
    server.end(6)
    server.clock.pass_s(FRESH_S)
    assert (server.fill(), server.places.limit) == (0, 0)
    assert server.places.held == "held: the server has not reported its load for 3 s"
    server.reports(0)
    assert server.fill() == 6


def test_a_request_of_several_texts_takes_as_many_places() -> None:
    server = Endpoint()
    server.reports(6)
    server.send(num_texts=5)
    assert server.places.num_others == 6, "none of ours is taken for another client's"
    assert server.fill() == 1
    server.reports(6)
    assert server.places.num_others == 6


def test_without_a_reserve_others_make_no_difference() -> None:
    server = Endpoint(num_kept=0)
    assert (server.places.limit, server.places.held) == (MOST, None)
    server.reports(40, waiting=40)
    assert server.fill() == MOST


Event = tuple[str, int]
events = st.lists(
    st.one_of(
        st.tuples(st.just("fills"), st.just(0)),
        st.tuples(st.just("ends"), st.integers(0, 40)),
        st.tuples(st.just("others"), st.integers(0, 20)),
        st.tuples(st.just("passes"), st.integers(1, 4_000)),  # ms
    ),
    max_size=60,
)


@given(events, st.integers(1, MOST - 1))
def test_what_is_sent_leaves_the_reserve_free_beside_all_that_was_reported_lately(
    happened: Sequence[Event], num_kept: int
) -> None:
    server = Endpoint(num_kept)
    reported: list[tuple[float, int]] = []
    for what, number in happened:
        match what:
            case "fills":
                before = server.places.num_in_flight
                server.fill()
                now = server.clock()
                if server.places.num_in_flight > before:
                    assert now - reported[-1][0] < FRESH_S
                    most = max(others for at_s, others in reported if at_s > now - PEAK_S)
                    assert server.places.num_in_flight + most + num_kept <= MOST
            case "ends":
                server.end(min(number, len(server.flights)))
            case "others":
                server.reports(number, after_s=0.0)
                reported.append((server.clock(), number))
            case "passes":
                server.clock.pass_s(number / 1000)
        assert 0 <= server.places.limit <= MOST - num_kept
        assert server.places.has_room == (server.places.num_in_flight < server.places.limit)
        assert (server.places.held is None) == server.places.has_room


def reserved(name: str, reserve: float = 0.25) -> InferenceServer:
    server = server_of(name, None, 0, MOST)
    more = {"max_requests": MOST, "reserve": reserve}
    return replace(server, endpoint=server.endpoint.model_copy(update=more))


class Fleets:
    """A fleet of a server with a reserve and one without."""

    def __init__(self, *servers: InferenceServer) -> None:
        self.clock = Clock()
        self.fleet = Fleet(servers, clock=self.clock, rng=Random(0))

    def others(self, name: str, num: int) -> None:
        places = self.fleet.members[name].places
        places.reported(Present(num + places.num_texts, 0), places.num_texts)


def test_a_job_that_one_server_keeps_out_goes_to_another() -> None:
    world = Fleets(reserved("shared"), server_of("own", None, 0, 1))
    world.others("shared", 12)
    assert world.fleet.choose(None, is_bound=False) == "own"
    assert world.fleet.held_by(None, is_bound=False) == ("shared",)
    world.fleet.began("own")
    assert world.fleet.choose(None, is_bound=False) is None
    assert world.fleet.choose(None, is_bound=False, alone=True) is None, "a suspect waits too"
    assert not world.fleet.is_away(None, is_bound=False)
    world.clock.pass_s(PEAK_S)
    world.others("shared", 0)
    assert world.fleet.choose(None, is_bound=False) == "shared"
    assert world.fleet.held_by(None, is_bound=False) == ()


def test_an_endpoint_that_keeps_places_free_is_up_and_says_what_it_holds() -> None:
    world = Fleets(reserved("shared"))
    world.others("shared", 9)
    (status,) = world.fleet.statuses({"shared": 5})
    assert (status.state, status.limit, status.num_kept, status.num_others, status.held) == ("up", 3, 4, 9, None)
    world.others("shared", 13)
    (status,) = world.fleet.statuses({"shared": 5})
    reason = "held for others: 3 of 16 places are free, 4 stay free"
    assert (status.state, status.limit, status.held) == ("up", 0, HeldRequests(5, reason))
    assert status.held is not None
    assert status.held.sentence == f"5 jobs {reason}"


class Reporting(ServerClient):
    """A client whose server reports its load, or fails to."""

    says: int | Exception = 0
    num_asked = 0

    async def page(self, url: str) -> bytes:
        self.num_asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return f"vllm:num_requests_running {self.says}\nvllm:num_requests_waiting 0\n".encode()


def turn(watch: LoadWatch) -> None:
    async def run() -> None:
        watching = asyncio.create_task(watch.run())
        for _ in range(20):
            await asyncio.sleep(0)
        watching.cancel()

    with patch("worker.servers.counters.EVERY_S", 0.0):
        asyncio.run(run())


def test_only_servers_with_a_reserve_are_asked_where_there_is_one_route_and_when_something_is_held() -> None:
    world = Fleets(reserved("shared"), server_of("own", None, 0, 1))
    clients = {name: Reporting(server.endpoint) for name, server in world.fleet.servers.items()}
    watch = LoadWatch(clients, world.fleet, clock=world.clock)
    turn(watch)
    assert [client.num_asked for client in clients.values()] == [0, 0]
    assert world.fleet.held_by(None, is_bound=False) == ("shared",)
    turn(watch)
    assert clients["shared"].num_asked > 0
    assert clients["own"].num_asked == 0
    assert world.fleet.members["shared"].has_room


@pytest.mark.parametrize("reserve", [0.0, 0.25])
def test_a_reserve_without_a_report_is_warned_of_once(reserve: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    drafting = server_of("ngram", "ngram", 4, MOST)
    world = Fleets(reserved("shared", reserve), drafting)
    clients = {name: Reporting(server.endpoint) for name, server in world.fleet.servers.items()}
    clients["shared"].says = RequestRefused("no such page")
    world.fleet.began("ngram")
    watch = LoadWatch(clients, world.fleet, clock=world.clock)
    turn(watch)
    turn(watch)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    told = "shared does not report its load: no such page"
    warned = f"{told}; with a reserve nothing is sent there until it does"
    assert said == [("WARNING", warned) if reserve else ("INFO", told)]


def test_a_server_that_takes_no_connection_has_no_requests() -> None:
    world = Fleets(reserved("shared"))
    client = Reporting(world.fleet.servers["shared"].endpoint)
    client.says = ServerUnreachable("refused")
    world.fleet.began("shared")
    turn(LoadWatch({"shared": client}, world.fleet, clock=world.clock))
    assert world.fleet.members["shared"].places.limit == 12


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kind": "openai"}, "no page is known on which a server of kind openai reports how many requests it has"),
        ({"kind": "tensorrt_llm"}, "of kind tensorrt_llm"),
        ({"kind": "vllm", "max_requests": 1}, "expected a reserve that leaves a place, found 0.25 of max_requests = 1"),
        ({"kind": "vllm", "reserve": 1.0}, "less than 1"),
        ({"kind": "vllm", "reserve": -0.1}, "greater than or equal to 0"),
    ],
)
def test_a_reserve_that_cannot_be_kept_is_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        EndpointSettings.model_validate({"url": URL, "reserve": 0.25, **given})


@pytest.mark.parametrize(
    ("max_requests", "reserve", "num_kept"), [(16, 0.25, 4), (10, 0.7, 7), (10, 0.01, 1), (3, 1 / 3, 1), (16, 0.0, 0)]
)
def test_the_reserve_is_rounded_up_to_whole_places(max_requests: int, reserve: float, num_kept: int) -> None:
    settings = EndpointSettings(kind="vllm", url=URL, max_requests=max_requests, reserve=reserve)
    assert settings.num_kept == num_kept


def test_a_gateway_with_a_page_of_metrics_may_have_a_reserve_and_counts_no_drafts() -> None:
    settings = EndpointSettings(kind="openai", url=URL, metrics_url="http://gpu:8000/metrics", reserve=0.5)
    assert settings.counted == ""
