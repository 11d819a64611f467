"""Bounds of totals and medians: known figures, and that they hold as often as they say, all of them at once."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from alphaloop.payoff.figures import PromptBlock, median_bounds, min_values, percentile, total_bounds


@pytest.mark.parametrize(("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (30, (10, 21)), (100, (40, 61))])
def test_the_ranks_are_those_of_the_sign_test(n: int, ranks: tuple[int, int], rng: random.Random) -> None:
    values = [float(i) for i in range(1, n + 1)]
    rng.shuffle(values)
    bounds = median_bounds(values)
    assert (bounds.low, bounds.high) == ranks
    assert bounds.estimate == (n + 1) / 2


@pytest.mark.parametrize("num_comparisons", [1, 2, 3, 6, 25])
def test_so_many_values_bound_so_many_medians_and_one_fewer_does_not(num_comparisons: int) -> None:
    enough = min_values(num_comparisons)
    assert median_bounds(range(enough), num_comparisons).known == (0, enough - 1)
    assert median_bounds(range(enough - 1), num_comparisons).known is None


def test_all_bounds_hold_at_once(seed: int) -> None:
    draws = np.random.default_rng(seed)
    num_trials, num_candidates, num_prompts = 500, 4, 14
    held = narrow = 0
    for _ in range(num_trials):
        # What the candidates share, a hard prompt or an easy one, makes their ratios go together.
        ratios = np.exp(0.3 * draws.standard_normal(num_prompts) + 0.2 * draws.standard_gamma(1, (4, num_prompts)))
        # Median of a sum of a normal and an exponential variable, by its own simulation below.
        found = [median_bounds(row, num_candidates).known for row in ratios.tolist()]
        held += all(low <= TRUE_MEDIAN <= high for low, high in found if (low, high))
        narrow += all(low > min(row) for (low, _), row in zip(found, ratios.tolist(), strict=True))
    # Four standard errors below 95 %; the exact level with 14 values is above it.
    assert held / num_trials > 0.91
    assert narrow == num_trials, "with 14 values the outermost ones are not needed"


def _true_median() -> float:
    draws = np.random.default_rng(0)
    many = np.exp(0.3 * draws.standard_normal(400_000) + 0.2 * draws.standard_gamma(1, 400_000))
    return float(np.median(many))


TRUE_MEDIAN = _true_median()


def test_the_ratio_of_all_tokens_weighs_a_block_by_its_time() -> None:
    # Sixteen short blocks at 1.30 and four long ones at .75.
    vanilla = [PromptBlock(100, 1.0)] * 16 + [PromptBlock(2000, 20.0)] * 4
    ours = [PromptBlock(b.num_tokens, b.wall_s / (1.3 if b.wall_s == 1.0 else 0.75)) for b in vanilla]
    found = total_bounds(ours, vanilla)
    assert found.estimate == pytest.approx(96 / (16 / 1.3 + 80 / 0.75))
    assert found.known is not None
    assert found.known[0] < found.estimate < found.known[1]
    assert median_bounds([a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, vanilla, strict=True)]).estimate == 1.3


def test_one_long_block_beside_short_ones_bounds_nothing() -> None:
    vanilla = [PromptBlock(10, 0.1)] * 9 + [PromptBlock(9000, 90.0)]
    assert total_bounds(vanilla, vanilla).known is None


@pytest.mark.parametrize("num_blocks", [6, 20, 60])
def test_bounds_of_totals_hold_the_truth(num_blocks: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    held, repeats, true_ratio = 0, 400, math.exp(-(0.2**2) / 2)  # of the time of all tokens: E[1 / ratio]
    for _ in range(repeats):
        seconds = draws.lognormal(0, 0.6, num_blocks)
        ratios = draws.lognormal(0, 0.2, num_blocks)
        vanilla = [PromptBlock(round(1e4 * s), s) for s in seconds]
        ours = [PromptBlock(round(1e4 * s), s / r) for s, r in zip(seconds, ratios, strict=True)]
        low, high = total_bounds(ours, vanilla).known or (0.0, math.inf)
        held += low <= true_ratio <= high
    assert 0.91 <= held / repeats <= 0.99


def test_percentiles_are_interpolated(rng: random.Random) -> None:
    values = [rng.random() for _ in range(rng.randint(1, 60))]
    for share in (0.5, 0.95, 0.99):
        assert percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)))
