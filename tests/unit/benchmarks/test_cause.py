"""Simulated histories with known causes: a short run of `python -m benchmarks.cause`."""

from __future__ import annotations

from benchmarks.cause.__main__ import WITH_CAUSE, WITHOUT, outcomes
from benchmarks.cause.histories import KINDS, make, scenarios
from scheduler.causes import Cause


def test_the_cause_is_named_rightly_in_most_scenarios() -> None:
    counted = outcomes(scenarios(WITH_CAUSE, 1))
    num_right = sum(number for (_, expected, found), number in counted.items() if expected == found)
    assert counted.total() == len(WITH_CAUSE) > 25
    assert num_right / counted.total() >= 0.95


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    counted = outcomes(scenarios(WITHOUT, 3))
    assert sum(number for (_, _, found), number in counted.items() if found != "none") <= 1


def test_every_cause_is_among_the_scenarios_and_a_seed_draws_the_same_again() -> None:
    assert {cause for expected, _ in KINDS.values() for cause in expected} == set(Cause)
    assert make("fault", 3) == make("fault", 3) != make("fault", 4)
