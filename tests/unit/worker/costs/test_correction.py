"""The rule: lasting changes are followed after one half-life, shorter disturbances never; and its weighted median.

What is not used is doubted: its correction fades towards the target's, and comes back with its own rounds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.costs import HALF_LIFE_ROUNDS, HALF_LIFE_S, PRIOR_SD, LogEstimate
from worker.costs.correction import Correction, ExponentialMedian, Moment

HALF_LIFE = 32
NOW = Moment(0.0, 0)
SIZES = ("narrow", "wide", "seldom")

ratios = st.floats(1e-3, 1e3)


class OfTheTarget(Correction[str]):
    """Of the target, which takes part in every round."""

    def __init__(self, known: Mapping[str, LogEstimate]) -> None:
        super().__init__(HALF_LIFE, known, NOW)

    def took(self, shape: str, ratio: float) -> None:
        self.observe(shape, ratio, NOW, None)


def calibrated() -> OfTheTarget:
    return OfTheTarget(dict.fromkeys(SIZES, LogEstimate(0.0, 0.0)))


def factor(correction: Correction[str], shape: str) -> float:
    return math.exp(correction.log_level + correction.deviation(shape).mean)


@settings(max_examples=40)
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


@settings(max_examples=40)
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
    correction = calibrated()
    for _ in range(900):
        shape = rng.choice(("narrow", "wide"))
        noise = math.exp(rng.gauss(0, 0.05))  # as a quiet machine shows it
        correction.took(shape, noise * (1.6 if shape == "wide" else 1.0))
    assert factor(correction, "wide") / factor(correction, "narrow") == pytest.approx(1.6, rel=0.15)
    assert correction.deviation("wide").num_rounds > 300
    assert correction.deviation("seldom").num_rounds == 0


@given(st.integers(1, 40), st.lists(st.floats(-5, 5), max_size=400))
def test_the_median_is_the_weighted_median_of_all_values_kept(half_life: int, values: list[float]) -> None:
    median = ExponentialMedian(half_life, 0.5)
    for value in values:
        median.add(value)
    kept = values[-5 * half_life :][::-1]
    weighted = [(value, 2 ** (-age / half_life)) for age, value in enumerate(kept)]
    total = 1 / (1 - 2 ** (-1 / half_life))
    weighted.append((0.5, total - sum(weight for _, weight in weighted)))
    below = sum(weight for value, weight in weighted if value < median.value)
    above = sum(weight for value, weight in weighted if value > median.value)
    assert below <= total / 2 + 1e-6
    assert above <= total / 2 + 1e-6
    assert median.num_values == len(values)


@given(st.integers(1, 40), st.floats(0.01, 2), st.floats(0.1, 1), st.floats(-2, 2))
def test_what_was_known_first_is_doubted_less_with_every_value(
    half_life: int, variance: float, share: float, value: float
) -> None:
    median = ExponentialMedian(half_life, value, variance, share)
    before = median.variance
    for _ in range(4 * half_life):
        median.add(value)
        assert median.variance < before
        before = median.variance
    assert before < variance / 8


def test_the_variance_is_that_of_a_median_of_independent_values() -> None:
    rng, half_life = random.Random(1), 16
    medians, variances = [], []
    for _ in range(200):
        median = ExponentialMedian(half_life, 0.0)
        for _ in range(6 * half_life):
            median.add(rng.gauss(0, 0.1))
        medians.append(median.value)
        variances.append(median.variance)
    assert statistics.mean(variances) == pytest.approx(statistics.variance(medians), rel=0.3)


def of_a_drafter() -> Correction[str]:
    return Correction(HALF_LIFE, {"shape": LogEstimate(0.0, 0.0)}, NOW)


def use(correction: Correction[str], level: float, now: Moment, num_rounds: int = 4 * HALF_LIFE) -> None:
    for _ in range(num_rounds):
        correction.observe("shape", math.exp(level), now, 0.0)


def test_seconds_and_rounds_of_the_target_each_bring_it_closer_to_the_targets_and_make_it_doubtful() -> None:
    correction = of_a_drafter()
    use(correction, 1.0, NOW, HALF_LIFE + 2)  # short enough to count as no lasting slowness
    before = correction.level(NOW, 0.0)
    assert before.mean == pytest.approx(1.0)
    for now in (Moment(HALF_LIFE_S, 0), Moment(0.0, HALF_LIFE_ROUNDS), Moment(HALF_LIFE_S / 2, HALF_LIFE_ROUNDS // 2)):
        level = correction.level(now, 0.0)
        assert level.mean == pytest.approx(0.5, abs=0.05)
        assert level.variance == pytest.approx(before.variance / 4 + 0.75 * PRIOR_SD**2, rel=0.05)
        assert correction.level(now, -1.0).mean == pytest.approx(0.0, abs=0.05)


def test_the_target_itself_does_not_fade() -> None:
    correction = of_a_drafter()
    for _ in range(4 * HALF_LIFE):
        correction.observe("shape", 2.0, NOW, None)
    level = correction.level(Moment(100 * HALF_LIFE_S, 0), None)
    assert level.factor == pytest.approx(2.0)
    assert level.variance < 0.01


@given(st.floats(-2, 2), st.floats(1, 50))
def test_after_a_pause_a_few_rounds_of_its_own_are_believed(level: float, pause: float) -> None:
    correction = of_a_drafter()
    use(correction, 1.0, NOW, HALF_LIFE + 1)
    now = Moment(pause * 2 * HALF_LIFE_S, 0)
    use(correction, level, now, HALF_LIFE // 2)
    assert correction.level(now, 0.0).mean == pytest.approx(level, abs=0.05)


def test_one_slow_round_after_a_pause_is_not_believed() -> None:
    correction = of_a_drafter()
    use(correction, 0.0, NOW)
    now = Moment(20 * HALF_LIFE_S, 0)
    correction.observe("shape", 100.0, now, 0.0)
    assert correction.level(now, 0.0).mean == pytest.approx(0.0)


def test_between_rounds_of_other_drafters_nothing_is_forgotten() -> None:
    correction = of_a_drafter()
    for number in range(40 * HALF_LIFE):
        correction.observe("shape", 3.0, Moment(number * HALF_LIFE_S / 50, 0), 0.0)
    now = Moment(40 * HALF_LIFE * HALF_LIFE_S / 50, 0)
    assert correction.level(now, 0.0).factor == pytest.approx(3.0, rel=0.05)


def test_what_has_been_slow_for_long_fades_slowly_until_it_was_seen_fast() -> None:
    def left_after_a_half_life(num_slow: int, num_fast: int) -> float:
        correction = of_a_drafter()
        use(correction, 1.0, NOW, num_slow)
        use(correction, 0.0, NOW, num_fast)
        use(correction, 1.0, NOW, HALF_LIFE + 2)
        return correction.level(Moment(HALF_LIFE_S, 0), 0.0).mean

    brief, lasting, over = (
        left_after_a_half_life(*n) for n in ((0, 0), (40 * HALF_LIFE, 0), (40 * HALF_LIFE, 4 * HALF_LIFE))
    )
    assert brief == pytest.approx(0.5, abs=0.05)
    assert lasting > 0.9
    assert over == pytest.approx(brief, abs=0.05)
