"""Requests that have to run alone: they get an endpoint for themselves, and the others keep theirs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from alphaloop.errors import ServerUnreachable
from tests.fixtures.simulated_fleet import Clock
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import FleetEndpoint
from worker.servers.health import ASKS_AGAIN_S
from worker.servers.load import Flight


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fleet_of(clock: Clock, *, plain: int = 0, ngram: int = 0) -> Fleet:
    endpoints = [FleetEndpoint(f"plain-{number}", None, 0, 4) for number in range(plain)]
    endpoints += [FleetEndpoint(f"ngram-{number}", "ngram", 4, 4) for number in range(ngram)]
    return Fleet(endpoints, clock=clock, rng=Random(0))


def ask_alone(fleet: Fleet, drafter: str | None = None, *, is_bound: bool = False) -> str | None:
    """Ask as a suspect does; the tests that are asked for pass."""
    if (name := fleet.choose(drafter, is_bound=is_bound, alone=True)) is not None:
        return name
    for due in fleet.due_tests():
        fleet.tested(due, None)
    return fleet.choose(drafter, is_bound=is_bound, alone=True)


def fill(fleet: Fleet, drafter: str | None = None) -> list[Flight]:
    flights = []
    while (name := fleet.choose(drafter, is_bound=False)) is not None:
        flights.append(fleet.began(name))
    return flights


def kept(fleet: Fleet) -> set[str]:
    return {status.name for status in fleet.statuses() if status.is_for_suspect}


def test_an_endpoint_is_tested_just_before_a_suspect_goes_there(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=2)
    assert fleet.choose(None, is_bound=False, alone=True) is None
    assert fleet.next_change_s() == 0
    (name,) = fleet.due_tests()
    fleet.tested(name, None)
    assert fleet.choose(None, is_bound=False, alone=True) == name
    clock.pass_s(6.0)
    assert fleet.choose(None, is_bound=False, alone=True) is None
    assert fleet.due_tests() == (name,)


def test_nothing_else_goes_where_a_suspect_is(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=2)
    name = ask_alone(fleet)
    assert name is not None
    flight = fleet.began(name, alone=True)
    clock.pass_s(100.0)
    assert name not in {flight.endpoint for flight in fill(fleet)}
    assert kept(fleet) == {name}
    assert fleet.num_places == 5
    fleet.ended(flight)
    assert kept(fleet) == set()
    assert {flight.endpoint for flight in fill(fleet)} == {name}


def test_a_full_fleet_empties_one_endpoint_for_a_suspect(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=3)
    flights = fill(fleet)
    assert ask_alone(fleet) is None
    (name,) = kept(fleet)
    for flight in [flight for flight in flights if flight.endpoint == name]:
        assert ask_alone(fleet) is None
        fleet.ended(flight)
        assert name not in {flight.endpoint for flight in fill(fleet)}
    assert ask_alone(fleet) == name


def test_an_endpoint_that_no_suspect_asks_for_any_more_is_free_again(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=2)
    fill(fleet)
    assert ask_alone(fleet) is None
    assert len(kept(fleet)) == 1
    clock.pass_s(ASKS_AGAIN_S)
    assert kept(fleet) == set()


def test_the_next_suspect_follows_on_the_same_endpoint(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=3)
    name = ask_alone(fleet)
    assert name is not None
    flight = fleet.began(name, alone=True)
    fill(fleet)
    clock.pass_s(1.0)
    assert ask_alone(fleet) is None, "half of three endpoints is one"
    fleet.ended(flight)
    fill(fleet)
    assert ask_alone(fleet) == name


def test_at_most_half_of_the_fleet_has_suspects(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=5)
    for _ in range(2):
        name = ask_alone(fleet)
        assert name is not None
        fleet.began(name, alone=True)
    assert ask_alone(fleet) is None


def test_a_suspect_rather_takes_no_routes_only_endpoint(clock: Clock) -> None:
    for seed_s in range(10):
        clock.pass_s(float(seed_s))
        fleet = fleet_of(clock, plain=1, ngram=2)
        assert str(ask_alone(fleet)).startswith("ngram")
    fleet = fleet_of(clock, plain=1, ngram=2)
    assert ask_alone(fleet, is_bound=True) == "plain-0"


def test_a_suspect_rather_goes_where_the_server_has_just_started(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=3)
    fleet.began("plain-1")
    fleet.failed("plain-1", ServerUnreachable())
    clock.pass_s(1.0)
    assert "plain-1" in fleet.due_tests()
    fleet.tested("plain-1", None)
    assert fleet.choose(None, is_bound=False, alone=True) is None
    assert kept(fleet) == {"plain-1"}


def test_the_only_endpoint_of_a_fleet_serves_suspects_and_others_in_turn(clock: Clock) -> None:
    fleet = fleet_of(clock, plain=1)
    served: list[tuple[bool, float]] = []
    alone: Flight | None = None
    others: list[tuple[Flight, float]] = []
    for _ in range(400):
        clock.pass_s(0.5)
        if alone is not None and clock() - alone.began_s >= 3.0:
            fleet.ended(alone)
            served.append((True, clock()))
            alone = None
        for flight, _until_s in [found for found in others if found[1] <= clock()]:
            fleet.ended(flight)
            served.append((False, clock()))
        others = [found for found in others if found[1] > clock()]
        if alone is None and (name := ask_alone(fleet)) is not None:
            alone = fleet.began(name, alone=True)
        others += [(flight, clock() + 2.0) for flight in fill(fleet)]
    num_alone = sum(is_alone for is_alone, _ in served)
    assert num_alone > 15
    assert len(served) - num_alone > 100
    turns_s = [at for is_alone, at in served if is_alone]
    assert max(then - now for now, then in pairwise(turns_s)) <= 2 * (3.0 + 2.0) + 3.0, (
        "as long for the others as for a suspect and the wait for it"
    )
