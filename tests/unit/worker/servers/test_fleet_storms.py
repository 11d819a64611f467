"""Simulated fleets under fault: who is blamed, who waits, and what a fault costs the others."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.errors import RequestKillsServer
from tests.fixtures.simulated import FleetSimulation, SimulatedJob, server_of

ALL_DAY_S = 86_400.0


def fleet_of(num: int, *, seed: int, max_requests: int = 16) -> FleetSimulation:
    return FleetSimulation([server_of(f"s{number}", None, 0, max_requests) for number in range(num)], seed=seed)


def jobs(num: int, mean_s: float, rng: Random) -> list[SimulatedJob]:
    return [SimulatedJob(f"innocent-{number}", rng.expovariate(1 / mean_s)) for number in range(num)]


def poison(number: int, rng: Random) -> SimulatedJob:
    return SimulatedJob(f"poison-{number}", 30.0, kills_after_s=rng.uniform(0.2, 3.0))


def run(simulation: FleetSimulation, num: int, mean_s: float, rng: Random) -> None:
    """So many jobs, all of which are finished within a day."""
    simulation.send(jobs(num, mean_s, rng))
    simulation.run(ALL_DAY_S)
    assert len(simulation.finished) == num


def num_deaths(simulation: FleetSimulation) -> int:
    return sum(server.num_deaths for server in simulation.servers.values())


@pytest.mark.parametrize("fails_for_s", [0.0, 3.0])
@pytest.mark.parametrize("num_poisons", [1, 4])
def test_a_thousand_jobs_with_poison_among_them(num_poisons: int, fails_for_s: float) -> None:
    """Four servers die for each poison, no matter how long they answer 500 to all before, and nobody else is blamed."""
    rng = Random(num_poisons)
    simulation = fleet_of(4, seed=num_poisons)
    for server in simulation.servers.values():
        server.fails_for_s = fails_for_s
    sent = jobs(1000 - num_poisons, 5.0, rng)
    for number in range(num_poisons):
        sent.insert(rng.randrange(400), poison(number, rng))
    simulation.send(sent)
    simulation.run(ALL_DAY_S)
    assert simulation.is_done
    assert set(simulation.blamed) == {f"poison-{number}" for number in range(num_poisons)}
    assert all(verdict.is_final for verdict in simulation.blamed.values())
    assert all(isinstance(verdict.error, RequestKillsServer) for verdict in simulation.blamed.values())
    assert len(simulation.finished) == 1000 - num_poisons
    assert 3 * num_poisons <= num_deaths(simulation) <= 4 * num_poisons


def test_a_rolling_restart_blames_nobody() -> None:
    """Long jobs, and each of four replicas restarts three times."""
    simulation = fleet_of(4, seed=1)
    for number in range(12):
        simulation.at(20.0 + 90.0 * number, lambda name=f"s{number % 4}": simulation.kill(name))  # type: ignore[misc]
    run(simulation, 600, 60.0, Random(1))
    assert num_deaths(simulation) == 12


def test_one_flapping_replica_costs_the_jobs_that_are_there_and_no_others() -> None:
    simulation, rng = fleet_of(4, seed=2), Random(2)

    def flap() -> None:
        simulation.kill("s0", restarts_after_s=3.0)
        simulation.at(3.0 + rng.expovariate(1 / 6), flap)

    simulation.at(10.0, flap)
    run(simulation, 1000, 5.0, rng)
    assert num_deaths(simulation) > 5
    assert sum(simulation.num_tries.values()) < 1100
    assert simulation.clock() < 100 + 1000 * 5.0 / (3 * 16) * 1.5, "three servers' time and a half"


def test_a_slow_replica_gets_what_it_can_do() -> None:
    simulation = fleet_of(4, seed=3)
    simulation.servers["s0"].slowness = 10.0
    run(simulation, 1000, 5.0, Random(3))
    by_server = Counter(simulation.finished.values())
    assert by_server.total() == 1000
    assert by_server["s0"] < 60
    assert min(by_server[name] for name in ("s1", "s2", "s3")) > 280


@pytest.mark.parametrize("retry_after_s", [None, 2.0])
def test_servers_that_take_fewer_than_they_are_given_are_asked_less(retry_after_s: float | None) -> None:
    simulation = fleet_of(4, seed=4, max_requests=32)
    for server in simulation.servers.values():
        server.most, server.retry_after_s = 8, retry_after_s
    run(simulation, 1000, 5.0, Random(4))
    assert sum(simulation.num_tries.values()) < 2000, "at most one refusal for each job, where 24 of 32 were in the way"
    assert simulation.clock() - 100.0 < 2 * 1000 * 5.0 / (4 * 8), "at least half of what the servers could do"


def test_a_hung_server_costs_the_jobs_that_are_there_one_silence() -> None:
    simulation = fleet_of(3, seed=5)
    simulation.at(20.0, lambda: simulation.hang("s0"))
    simulation.at(200.0, lambda: simulation.kill("s0"))
    run(simulation, 400, 5.0, Random(5))
    assert max(simulation.num_tries.values()) == 2
    assert sum(simulation.num_tries.values()) <= 400 + 16


def test_outages_of_all_servers_count_against_nobody() -> None:
    simulation = fleet_of(4, seed=6)

    def away() -> None:
        for name in simulation.servers:
            simulation.kill(name, restarts_after_s=30.0)

    for number in range(5):
        simulation.at(20.0 + 120.0 * number, away)
    run(simulation, 200, 60.0, Random(6))
    assert num_deaths(simulation) == 20
    assert simulation.max_alone == 0


def test_neither_suspects_nor_bound_requests_starve() -> None:
    """One server a route, a flood that could take both, requests bound to the one, and poison for the other."""
    endpoints = [server_of("plain", None, 0, 4), server_of("ngram", "ngram", 4, 4)]
    simulation, rng = FleetSimulation(endpoints, seed=8), Random(8)
    simulation.send(jobs(800, 2.0, rng))
    for number in range(20):
        bound = SimulatedJob(f"bound-{number}", 2.0, drafter="ngram", is_bound=True)
        simulation.at(10.0 * number, lambda job=bound: simulation.send([job]))  # type: ignore[misc]
    killer = SimulatedJob("poison", 30.0, is_bound=True, kills_after_s=0.5)
    simulation.at(15.0, lambda: simulation.send([killer]))
    simulation.run(ALL_DAY_S)
    assert set(simulation.blamed) == {"poison"}
    waits_s = [waited_s for job_id, waited_s in simulation.waited_s.items() if job_id.startswith("bound")]
    assert len(waits_s) == 20
    assert max(waits_s) < 30.0, "of a flood that takes more than 200 seconds"
    assert simulation.clock() > 300.0


@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 3))
def test_every_job_ends_whatever_happens(seed: int, num_servers: int, num_poisons: int) -> None:
    """Random deaths, hangs, limits and poison for five minutes: poison is blamed, and everything else is finished."""
    rng, simulation = Random(seed), fleet_of(num_servers, seed=seed, max_requests=4)
    for name, server in simulation.servers.items():
        server.fails_for_s = rng.choice([0.0, 2.0])
        server.most = rng.choice([2, 4, 4])
        for _ in range(rng.randrange(3)):
            simulation.at(rng.uniform(0, 300), lambda name=name: simulation.kill(name))  # type: ignore[misc]
        if rng.random() < 0.3:
            hangs_s = rng.uniform(0, 200)
            simulation.at(hangs_s, lambda name=name: simulation.hang(name))  # type: ignore[misc]
            simulation.at(hangs_s + 100.0, lambda name=name: simulation.kill(name))  # type: ignore[misc]
    simulation.send([*jobs(60, 5.0, rng), *(poison(number, rng) for number in range(num_poisons))])
    simulation.run(ALL_DAY_S)
    assert simulation.is_done
    assert {f"poison-{number}" for number in range(num_poisons)} == set(simulation.blamed)
    assert len(simulation.finished) == 60
    assert max(simulation.num_tries[f"poison-{number}"] for number in range(num_poisons)) <= 60 if num_poisons else True
