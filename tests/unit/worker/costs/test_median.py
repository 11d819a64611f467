"""The median of a stream is a weighted median, and surer the more it rests on."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.costs.correction import ExponentialMedian


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
