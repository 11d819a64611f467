"""Verdicts at their boundaries, and what a verdict that is too close asks for."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from alphaloop.payoff.bounds import Bounds, median_bounds
from alphaloop.payoff.verdict import Judgement, Verdict, judge


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.3, 1.5, Verdict.SHIP),
        (1.2999, 1.5, Verdict.TOO_CLOSE),
        (1.1, 1.3, Verdict.TOO_CLOSE),
        (1.1, 1.2999, Verdict.DO_NOT_SHIP),
        (0.5, 0.6, Verdict.DO_NOT_SHIP),
        (1.0, 2.0, Verdict.TOO_CLOSE),
    ],
)
def test_the_bar_belongs_to_those_who_reach_it(low: float, high: float, verdict: Verdict) -> None:
    assert judge(Bounds((low + high) / 2, low, high, 30), 1.3, 3).verdict is verdict


def test_a_wrong_text_never_ships() -> None:
    assert judge(Bounds(2.0, 1.9, 2.1, 30), 1.3, 1, is_exact=False) == Judgement(Verdict.DO_NOT_SHIP)


def test_too_few_values_ask_for_as_many_as_bound_anything() -> None:
    judgement = judge(median_bounds([1.4] * 4, 3), 1.3, 3)
    assert judgement == Judgement(Verdict.TOO_CLOSE, 3)
    assert median_bounds([1.4] * 7, 3).known is not None


def test_a_median_at_the_bar_asks_for_nothing() -> None:
    assert judge(Bounds(1.3001, 1.1, 1.5, 30), 1.3, 1) == Judgement(Verdict.TOO_CLOSE, None)


def test_the_further_from_the_bar_the_fewer_more() -> None:
    asked = [judge(Bounds(median, 1.2, 1.7, 20), 1.3, 1).num_more for median in (1.36, 1.4, 1.45, 1.5)]
    numbers = [number for number in asked if number is not None]
    assert len(numbers) == 4
    assert numbers == sorted(numbers, reverse=True)
    assert min(numbers) >= 1


@pytest.mark.parametrize("median", [1.16, 1.45])
def test_so_many_more_prompts_settle_it_in_most_cases(median: float, seed: int) -> None:
    spread, bar, num = 0.3, 1.3, 16
    quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / num) for i in range(num)]
    typical = judge(median_bounds([median * math.exp(spread * z) for z in quantiles]), bar, 1)
    assert typical.verdict is Verdict.TOO_CLOSE
    assert typical.num_more is not None
    draws = np.random.default_rng(seed)
    settled = 0
    for _ in range(200):
        ratios = median * np.exp(spread * draws.standard_normal(num + typical.num_more))
        settled += judge(median_bounds(ratios.tolist()), bar, 1).verdict is not Verdict.TOO_CLOSE
    assert 0.6 < settled / 200 < 0.995
