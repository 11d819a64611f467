"""Paired comparisons: exact on known figures, and intervals that hold what they claim."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.paired import CostPair, PromptPair, alpha_change, speedup


def test_the_same_fall_on_every_prompt_has_no_spread() -> None:
    change = alpha_change([PromptPair(10, 8, 10, 5)] * 4)
    assert change is not None
    assert change.mean == pytest.approx(-0.3)
    assert (change.low, change.high) == (pytest.approx(-0.3), pytest.approx(-0.3))


def test_one_prompt_says_nothing_about_the_spread() -> None:
    change = alpha_change([PromptPair(10, 8, 10, 5)])
    assert change is not None
    assert (change.low, change.high) == (-1.0, 1.0)


def test_without_trials_there_is_no_change() -> None:
    assert alpha_change([]) is None
    assert alpha_change([PromptPair(5, 4, 0, 0)]) is None


def test_two_prompts_by_hand() -> None:
    # Changes -.02 and -.04 with equal trials: mean -.03, standard error .01, Student's t(1) is 12.706.
    change = alpha_change([PromptPair(100, 80, 100, 78), PromptPair(100, 80, 100, 76)])
    assert change is not None
    assert change.mean == pytest.approx(-0.03)
    assert change.high == pytest.approx(-0.03 + 0.12706)
    assert change.low == pytest.approx(-0.03 - 0.12706)


def test_the_interval_covers_the_true_change(rng: random.Random, seed: int) -> None:
    covered, repeats = 0, 400
    for _ in range(repeats):
        pairs = []
        for _ in range(8):
            alpha = rng.uniform(0.5, 0.9)
            before = sum(rng.random() < alpha for _ in range(20))
            after = sum(rng.random() < alpha - 0.1 for _ in range(20))
            pairs.append(PromptPair(20, before, 20, after))
        change = alpha_change(pairs)
        assert change is not None
        covered += change.low <= -0.1 <= change.high
    print(f"seed {seed}: {covered / repeats:.1%} of 95 % intervals hold the true change")
    assert covered / repeats > 0.90


def test_speedup_of_pairs() -> None:
    ratio = speedup([CostPair(48, 1.0, 48, 2.0), CostPair(48, 2.0, 48, 4.0)])
    assert ratio is not None
    assert ratio.mean == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(2.0)), "every pair agrees"


def test_unpaired_sides_are_less_certain_than_pairs(rng: random.Random) -> None:
    lengths = [rng.uniform(1, 10) for _ in range(12)]
    pairs = [CostPair(48, s, 48, 1.5 * s * rng.uniform(0.95, 1.05)) for s in lengths]
    sides = [CostPair(p.tokens, p.device_s, 0, 0) for p in pairs]
    sides += [CostPair(0, 0, p.control_tokens, p.control_device_s) for p in pairs]
    paired, unpaired = speedup(pairs), speedup(sides)
    assert paired is not None
    assert unpaired is not None
    assert paired.mean == pytest.approx(unpaired.mean)
    assert math.log(unpaired.high / unpaired.low) > 3 * math.log(paired.high / paired.low)


seconds = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))
tokens = st.integers(0, 1000)


@given(st.lists(st.tuples(tokens, seconds, tokens, seconds).map(lambda drawn: CostPair(*drawn)), max_size=8))
def test_a_speedup_lies_in_its_interval(pairs: list[CostPair]) -> None:
    ratio = speedup(pairs)
    if ratio is not None:
        assert 0 <= ratio.low <= ratio.mean <= ratio.high
