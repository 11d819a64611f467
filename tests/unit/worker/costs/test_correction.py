"""What the rule promises: lasting changes are followed after one half-life, shorter disturbances never."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import LogEstimate
from worker.costs.correction import Correction, Moment

HALF_LIFE = 32
NOW = Moment(0.0, 0)
SIZES = ("narrow", "wide", "seldom")

ratios = st.floats(1e-3, 1e3)


def noise(rng: random.Random, spread: float = 0.05) -> Callable[[], float]:
    """Times as a quiet machine shows them."""
    return lambda: math.exp(rng.gauss(0, spread))


class OfTheTarget(Correction[str]):
    """Of the target, which takes part in every round."""

    def __init__(self, known: Mapping[str, LogEstimate]) -> None:
        super().__init__(HALF_LIFE, known, NOW)

    def took(self, shape: str, ratio: float) -> None:
        self.observe(shape, ratio, NOW, None)


def calibrated() -> OfTheTarget:
    return OfTheTarget(dict.fromkeys(SIZES, LogEstimate(0.0, 0.0)))


def factor(correction: Correction[str], shape: str) -> float:
    """How much slower than calibrated this shape is."""
    return math.exp(correction.log_level + correction.deviation(shape).mean)


@given(st.lists(ratios, min_size=HALF_LIFE - 1, max_size=HALF_LIFE - 1), st.integers(0, 200))
def test_no_disturbance_shorter_than_the_half_life_moves_anything(burst: list[float], num_before: int) -> None:
    correction = calibrated()
    for _ in range(num_before):
        correction.took("narrow", 1.0)
    for ratio in burst:
        correction.took("narrow", ratio)
        assert factor(correction, "narrow") == pytest.approx(1.0)
        assert factor(correction, "seldom") == pytest.approx(1.0)
    for _ in range(3 * HALF_LIFE):
        correction.took("narrow", 1.0)
        assert factor(correction, "narrow") == pytest.approx(1.0)


@given(ratios, st.lists(st.sampled_from(SIZES), max_size=200))
def test_a_lasting_change_is_believed_in_full_after_one_half_life(ratio: float, before: list[str]) -> None:
    correction = calibrated()
    for shape in before:
        correction.took(shape, 1.0)
    for _ in range(HALF_LIFE + 1):
        correction.took("wide", ratio)
    assert correction.level(NOW, None).factor == pytest.approx(ratio)
    # Shapes that were not decoded meanwhile have become as slow, or speculation would be judged by yesterday's device.
    for shape in SIZES:
        assert factor(correction, shape) == pytest.approx(ratio)
    for _ in range(3 * HALF_LIFE):
        correction.took("wide", ratio)
        assert factor(correction, "wide") == pytest.approx(ratio)


def test_a_shape_calibrated_in_a_bad_moment_is_told_from_a_slow_device(rng: random.Random) -> None:
    correction, drawn = calibrated(), noise(rng)
    for _ in range(900):
        shape = rng.choice(("narrow", "wide"))
        correction.took(shape, drawn() * (1.6 if shape == "wide" else 1.0))
    assert factor(correction, "wide") / factor(correction, "narrow") == pytest.approx(1.6, rel=0.15)
    assert correction.deviation("wide").num_rounds > 300
    assert correction.deviation("seldom").num_rounds == 0
