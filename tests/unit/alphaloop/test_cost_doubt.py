from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import (
    HALF_LIFE_ROUNDS,
    HALF_LIFE_S,
    TIMING_SD,
    CostPoint,
    LogEstimate,
    after_pause,
    faded,
    num_half_lives,
    timing_variance,
)

logs, ages = st.floats(-3, 3), st.floats(0, 30)


@given(logs, st.floats(0, 1), logs, ages, ages)
def test_fading_twice_is_fading_once(mean: float, variance: float, towards: float, one: float, more: float) -> None:
    estimate = LogEstimate(mean, variance)
    twice, once = faded(faded(estimate, towards, one), towards, more), faded(estimate, towards, one + more)
    assert twice.mean == pytest.approx(once.mean, abs=1e-9)
    assert twice.variance == pytest.approx(once.variance, abs=1e-9)


def test_seconds_and_rounds_add_up() -> None:
    assert num_half_lives(HALF_LIFE_S, HALF_LIFE_ROUNDS) == 2.0
    assert num_half_lives(-5.0) == 0.0, "a clock that was set back makes nothing younger"


def test_the_variance_of_a_measurement_is_that_of_a_median_of_timings() -> None:
    rng = random.Random(1)
    medians = [statistics.median(rng.gauss(0, TIMING_SD) for _ in range(25)) for _ in range(4000)]
    assert timing_variance(25) == pytest.approx(statistics.variance(medians), rel=0.1)


def test_a_pause_leaves_what_shapes_differ_by_and_the_target_alone() -> None:
    points = [
        CostPoint(None, 1, 1, 30.0, 9, correction=2.0),
        CostPoint("a", 1, 2, 5.0, 9, correction=8.0),
        CostPoint("a", 1, 3, 9.0, 9, correction=8.0),
        CostPoint("a", 1, 9, 20.0, 9, correction=12.0),
        CostPoint("b", 1, 9, 20.0, 9, correction=8.0),
    ]
    target, *of_a, of_b = after_pause(points, {"a": HALF_LIFE_S, "b": 1.0})
    assert [target, of_b] == [points[0], points[-1]], "a second is no pause"
    assert [point.correction for point in of_a] == pytest.approx([4.0, 4.0, 6.0])
    assert all(point.correction_variance > 0.1 for point in of_a)


def test_without_points_of_the_target_a_correction_fades_towards_what_was_calibrated() -> None:
    (point,) = after_pause([CostPoint("a", 1, 9, 20.0, 9, correction=math.e)], {"a": 100 * HALF_LIFE_S})
    assert point.correction == pytest.approx(1.0)
