"""A law that is known is found again from times with errors, and its bounds hold it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from alphaloop.acceptance import Z95
from worker.costs.laws import Law, Time, fitted, usual

NODES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHAPE = tuple(1 + 0.05 * (load - 1) for load in NODES)
HALF_LIFE = 128


def linear(load: float, context: float) -> float:
    return 20.0 + 1.0 * load + 0.005 * context


def bent(load: float, context: float) -> float:
    """Nearly flat up to eight requests, then in proportion: a server whose device is full."""
    return 20.0 + 0.2 * load + 3.0 * max(0.0, load - 8)


def times(seed: int, number: int, loads: Sequence[int], law: Callable[[float, float], float] = linear) -> list[Time]:
    rng, found = random.Random(seed), []
    for _ in range(number):
        load, context = rng.choice(loads), rng.uniform(50, 1500)
        found.append(Time(load, context, law(load, context) * math.exp(rng.gauss(0, 0.1)), (3 + load) / 4))
    return found


def fit(found: Sequence[Time]) -> Law:
    return fitted(NODES, found, usual(NODES, SHAPE, found, 0.3), HALF_LIFE)


@pytest.mark.parametrize("law", [linear, bent])
@pytest.mark.parametrize(("number", "within"), [(150, 0.10), (400, 0.07)])
def test_it_comes_within_a_tenth_and_its_bounds_hold_the_law(
    law: Callable[[float, float], float], number: int, within: float
) -> None:
    loads, errors, covered = (1, 2, 4, 8, 16), [], []
    for seed in range(20):
        found = fit(times(seed, number, loads, law))
        for load in loads:
            for context in (256, 1024):
                told = found.at(load, context)
                error = told.mean - math.log(law(load, context))
                errors.append(abs(math.expm1(error)))
                covered.append(abs(error) <= Z95 * math.sqrt(told.variance))
    errors.sort()
    assert errors[int(0.95 * len(errors))] <= within
    assert sum(covered) / len(covered) >= 0.93


def test_what_lies_far_from_what_was_seen_is_doubtful() -> None:
    found = fit(times(1, 200, (1, 2)))
    seen, far = found.at(1), found.at(32)
    assert math.sqrt(seen.variance) < 0.05
    assert math.sqrt(far.variance) > 0.3
    assert abs(far.mean - math.log(linear(32, 256))) <= Z95 * math.sqrt(far.variance)


def test_requests_that_stall_move_little() -> None:
    found = times(2, 200, (1, 4, 8))
    stalled = [time._replace(ms=50 * time.ms) if number % 20 == 0 else time for number, time in enumerate(found)]
    for load in (1, 4, 8):
        assert math.exp(fit(stalled).at(load).mean) == pytest.approx(linear(load, 256), rel=0.1)


def test_with_few_times_a_law_is_that_of_its_prior() -> None:
    leading = fit(times(5, 300, (1, 2, 4, 8, 16, 32)))
    own = [Time(4.0, 256.0, 2 * linear(4, 256), 4.0)] * 6
    leaning = fitted(NODES, own, leading.as_prior(1.25, 0.4, 0.2), HALF_LIFE)
    none = fitted(NODES, [], leading.as_prior(1.25, 0.4, 0.2), HALF_LIFE)
    for load in (1, 8, 32):
        assert none.at(load).mean - leading.at(load).mean == pytest.approx(math.log(1.25))
        assert 1.6 < math.exp(leaning.at(load).mean - leading.at(load).mean) < 2.1
    assert leaning.at(4).variance < none.at(4).variance
