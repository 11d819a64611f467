"""Verdicts at their boundaries, and what a verdict that is too close asks for."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.payoff.figures import (
    Judgement,
    PromptBlock,
    RatioBounds,
    ShipVerdict,
    judge,
    median_bounds,
    total_bounds,
)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.3, 1.5, ShipVerdict.SHIP),
        (1.2999, 1.5, ShipVerdict.TOO_CLOSE),
        (1.1, 1.3, ShipVerdict.TOO_CLOSE),
        (1.1, 1.2999, ShipVerdict.DO_NOT_SHIP),
        (0.5, 0.6, ShipVerdict.DO_NOT_SHIP),
        (1.0, 2.0, ShipVerdict.TOO_CLOSE),
    ],
)
def test_the_bar_belongs_to_those_who_reach_it(low: float, high: float, verdict: ShipVerdict) -> None:
    assert judge(RatioBounds((low + high) / 2, low, high, 30), 1.3, 3).verdict is verdict


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    st.floats(0.1, 3.0),
    st.integers(1, 6),
)
def test_what_ships_is_faster_in_total_beyond_its_error(
    blocks: list[tuple[int, float, float]], bar: float, num_comparisons: int
) -> None:
    ours = [PromptBlock(num_tokens, wall_s) for num_tokens, wall_s, _ in blocks]
    vanilla = [PromptBlock(num_tokens, wall_s) for num_tokens, _, wall_s in blocks]
    bounds = total_bounds(ours, vanilla, num_comparisons)
    total = sum(b.wall_s for b in vanilla) / sum(b.wall_s for b in ours)
    assert bounds.estimate == pytest.approx(total)
    if judge(bounds, bar, num_comparisons).verdict is ShipVerdict.SHIP:
        assert bounds.low is not None
        assert 1 < bounds.low <= total * (1 + 1e-9)
        assert bounds.low >= bar


def test_a_median_above_the_bar_does_not_ship_a_slower_total() -> None:
    vanilla = [PromptBlock(100, 1.0)] * 16 + [PromptBlock(2000, 20.0)] * 4
    ours = [PromptBlock(b.num_tokens, b.wall_s / (1.3 if b.wall_s == 1.0 else 0.75)) for b in vanilla]
    assert judge(total_bounds(ours, vanilla), 1.2, 1).verdict is ShipVerdict.DO_NOT_SHIP


def test_a_bar_below_one_ships_nothing_that_may_be_slower() -> None:
    assert judge(RatioBounds(1.0, 0.95, 1.05, 30), 0.9, 1).verdict is ShipVerdict.TOO_CLOSE


def test_a_wrong_text_never_ships() -> None:
    assert judge(RatioBounds(2.0, 1.9, 2.1, 30), 1.3, 1, is_exact=False) == Judgement(ShipVerdict.DO_NOT_SHIP)


def test_too_few_values_ask_for_as_many_as_bound_anything() -> None:
    judgement = judge(median_bounds([1.4] * 4, 3), 1.3, 3)
    assert judgement == Judgement(ShipVerdict.TOO_CLOSE, 3)
    assert median_bounds([1.4] * 7, 3).known is not None


def test_a_median_at_the_bar_asks_for_nothing() -> None:
    assert judge(RatioBounds(1.3001, 1.1, 1.5, 30), 1.3, 1) == Judgement(ShipVerdict.TOO_CLOSE, None)


def test_the_further_from_the_bar_the_fewer_more() -> None:
    asked = [judge(RatioBounds(median, 1.2, 1.7, 20), 1.3, 1).num_more for median in (1.36, 1.4, 1.45, 1.5)]
    numbers = [number for number in asked if number is not None]
    assert len(numbers) == 4
    assert numbers == sorted(numbers, reverse=True)
    assert min(numbers) >= 1


@pytest.mark.parametrize("median", [1.16, 1.45])
def test_so_many_more_prompts_settle_it_in_most_cases(median: float, seed: int) -> None:
    spread, bar, num = 0.3, 1.3, 16
    quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / num) for i in range(num)]
    typical = judge(median_bounds([median * math.exp(spread * z) for z in quantiles]), bar, 1)
    assert typical.verdict is ShipVerdict.TOO_CLOSE
    assert typical.num_more is not None
    draws = np.random.default_rng(seed)
    settled = 0
    for _ in range(200):
        ratios = median * np.exp(spread * draws.standard_normal(num + typical.num_more))
        settled += judge(median_bounds(ratios.tolist()), bar, 1).verdict is not ShipVerdict.TOO_CLOSE
    assert 0.6 < settled / 200 < 0.995
