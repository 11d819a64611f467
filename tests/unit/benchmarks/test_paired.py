"""Ratios of paired measurements."""

from __future__ import annotations

import random

import pytest

from benchmarks.paired import paired_ratio


def test_a_machine_that_slows_down_leaves_the_ratio_alone(rng: random.Random) -> None:
    speeds = [rng.uniform(1, 100) for _ in range(9)]
    ratio = paired_ratio([1.5 * speed for speed in speeds], speeds)
    assert [ratio.median, ratio.low, ratio.high] == pytest.approx([1.5] * 3)
    assert ratio.num_pairs == 9


def test_bounds_hold_the_median_and_widen_with_the_noise(rng: random.Random) -> None:
    theirs = [1.0] * 25
    noise = [rng.uniform(-0.1, 0.1) for _ in theirs]
    quiet = paired_ratio([2 + error for error in noise], theirs)
    loud = paired_ratio([2 + 10 * error for error in noise], theirs)
    assert quiet.low < quiet.median < quiet.high
    assert loud.low < loud.median < loud.high
    assert loud.high - loud.low == pytest.approx(10 * (quiet.high - quiet.low))


def test_two_pairs_bound_nothing() -> None:
    ratio = paired_ratio([2.0, 3.0], [1.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.5, None, None)
    assert str(ratio) == "2.50 [no bounds]"
