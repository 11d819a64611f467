"""Ratios of paired measurements."""

from __future__ import annotations

import random

import pytest

from benchmarks.paired import Ratio, paired_ratio


def bounds(ratio: Ratio) -> tuple[float, float]:
    assert ratio.low is not None
    assert ratio.high is not None
    return ratio.low, ratio.high


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
    (quiet_low, quiet_high), (loud_low, loud_high) = bounds(quiet), bounds(loud)
    assert quiet_low < quiet.median < quiet_high
    assert loud_low < loud.median < loud_high
    assert loud_high - loud_low == pytest.approx(10 * (quiet_high - quiet_low))


def test_two_pairs_bound_nothing() -> None:
    ratio = paired_ratio([2.0, 3.0], [1.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.5, None, None)
    assert str(ratio) == "2.50 [no bounds]"
