"""Paired comparisons: exact on known figures, and intervals that hold what they claim."""

from __future__ import annotations

import random

import pytest

from scheduler.probe_history import PromptPair, alpha_change


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
    # Changes -.02 and -.04 with equal trials: mean -.03, standard error .01, Student's t(1) is 12.7062.
    change = alpha_change([PromptPair(100, 80, 100, 78), PromptPair(100, 80, 100, 76)])
    assert change is not None
    assert change.mean == pytest.approx(-0.03)
    assert change.high == pytest.approx(-0.03 + 0.127062, rel=1e-5)
    assert change.low == pytest.approx(-0.03 - 0.127062, rel=1e-5)


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
