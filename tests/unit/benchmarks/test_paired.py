"""Ratios of paired measurements."""

from __future__ import annotations

import math
import random

from benchmarks.paired import paired_ratio


def test_a_machine_that_slows_down_leaves_the_ratio_alone(rng: random.Random) -> None:
    speeds = [rng.uniform(1, 100) for _ in range(9)]
    ratio = paired_ratio([1.5 * speed for speed in speeds], speeds)
    for figure in (ratio.median, ratio.low, ratio.high):
        assert math.isclose(figure, 1.5)
    assert ratio.num_pairs == 9


def test_bounds_hold_the_median_and_widen_with_the_noise(rng: random.Random) -> None:
    theirs = [1.0] * 25
    noise = [rng.uniform(-0.1, 0.1) for _ in theirs]
    quiet = paired_ratio([2 + error for error in noise], theirs)
    loud = paired_ratio([2 + 10 * error for error in noise], theirs)
    for ratio in (quiet, loud):
        assert ratio.low < ratio.median < ratio.high
    assert math.isclose(loud.high - loud.low, 10 * (quiet.high - quiet.low))


def test_one_wild_pair_does_not_move_the_median() -> None:
    assert paired_ratio([2, 2, 2, 2, 200], [1] * 5).median == 2


def test_two_pairs_bound_nothing() -> None:
    ratio = paired_ratio([2.0, 3.0], [1.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.5, -math.inf, math.inf)
