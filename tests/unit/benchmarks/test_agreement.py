"""Forced blocks and the comparison of screens, on made figures."""

from __future__ import annotations

import random

import pytest

from alphaloop.acceptance import Interval
from benchmarks.agreement import LEAST_BLOCKS, Asked, ForcedBlock, agree, differences, forced_speedup, is_shown_right

FIGURE = {
    "speedup": 1.25,
    "low": 1.1,
    "high": 1.4,
    "num_blocks": 12,
    "min_num_draft_tokens": 2,
    "max_num_draft_tokens": 3,
}


def block(ratio: float, seconds: float = 2.0, tokens: int = 40) -> ForcedBlock:
    return ForcedBlock(ratio * seconds, tokens, seconds, tokens)


def test_a_constant_ratio_is_found_without_doubt() -> None:
    found = forced_speedup([block(1.25, seconds) for seconds in (1.0, 2.0, 5.0, 3.0)], 0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_other_numbers_of_tokens_are_taken_into_account() -> None:
    found = forced_speedup([ForcedBlock(4.0, 80, 1.0, 40)] * LEAST_BLOCKS, 0.95)
    assert found.mean == pytest.approx(2.0)


def test_bounds_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(5)
    held = 0
    for _ in range(400):
        found = forced_speedup([block(1.3 * rng.lognormvariate(0, 0.2)) for _ in range(10)], 0.95)
        # The blocks weigh alike, so the figure is the mean of the ratios: 1.3 · exp(.02).
        held += found.low <= 1.3 * 2.718281828**0.02 <= found.high
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.parametrize(("shown", "is_chance"), [((1.25, 1.1, 1.42), True), ((1.9, 1.7, 2.1), False)])
def test_figures_agree_within_both_intervals(shown: tuple[float, float, float], is_chance: bool) -> None:
    forced = Interval(1.1, 1.0, 1.21)
    assert agree(Interval(*shown), forced) is is_chance
    assert agree(forced, Interval(*shown)) is is_chance


def test_another_or_a_missing_figure_is_told_with_its_places() -> None:
    asked = [
        Asked("view", {"code": FIGURE}),
        Asked("status", {"code": {**FIGURE, "speedup": 1.26}}),
        Asked("metrics", {"code": {**FIGURE, "low": None}}),
    ]
    assert differences(asked, ["code"]) == [
        "code, speedup: view 1.25, status 1.26",
        "code, low: view 1.1, metrics None",
    ]


@pytest.mark.parametrize(
    ("unlike", "verdicts", "right"),
    [
        ([], ["agrees", "not compared"], True),
        ([], ["agrees", "DIFFERS"], False),
        (["code, speedup: view 1.2, status 1.3"], ["agrees"], False),
        ([], ["not compared", "not compared"], False),
    ],
)
def test_a_run_is_right_only_where_something_was_compared(unlike: list[str], verdicts: list[str], right: bool) -> None:
    assert is_shown_right(unlike, verdicts) is right
