"""The requests of others at a server: from what it tells now and then to the load of one request's life."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.simulated import Clock
from worker.engine import ServerLoad
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import FleetEndpoint
from worker.servers.load import FRESH_S, Flight

NAMES = ("plain", "ngram")
Event: TypeAlias = tuple[str, str, int]  #: what happens where, and with how many


class Servers:
    """Two endpoints on a clock of their own; `told` is what one says of its load."""

    def __init__(self) -> None:
        self.clock = Clock()
        endpoints = [FleetEndpoint("plain", None, 0, 100), FleetEndpoint("ngram", "ngram", 4, 100)]
        self.fleet = Fleet(endpoints, clock=self.clock, rng=Random(0))

    def told(self, name: str, num_present: int) -> None:
        self.fleet.told_load(name, num_present, self.fleet.num_own(name))

    def told_both(self, plain: int, ngram: int) -> None:
        self.told("plain", plain)
        self.told("ngram", ngram)


def test_what_a_server_has_above_our_own_is_of_others_until_it_tells_again() -> None:
    servers = Servers()
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
    servers = Servers()
    flights = [servers.fleet.began("plain") for _ in range(4)]
    for num_present in (6, 4, 7, 3):  # of others: 2, 0, 3, -1
        servers.told_both(num_present, 0)
        servers.clock.pass_s(1.0)
    assert servers.fleet.ended(flights[0]).load.num_beside == pytest.approx(4 + 1)


@pytest.mark.parametrize("silent", NAMES)
def test_a_load_that_one_server_told_too_long_ago_is_not_whole(silent: str) -> None:
    servers = Servers()
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
    servers, flights = Servers(), list[Flight]()
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
