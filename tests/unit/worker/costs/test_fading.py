"""What is not used is doubted: its correction fades towards the target's, and comes back with its own rounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import HALF_LIFE_ROUNDS, HALF_LIFE_S, PRIOR_SD, LogEstimate
from worker.costs.correction import Correction, Moment

HALF_LIFE = 16
START = Moment(0.0, 0)
levels = st.floats(-2, 2)
pauses_s = st.floats(0, 20 * HALF_LIFE_S)


def calibrated() -> Correction[str]:
    return Correction(HALF_LIFE, {"shape": LogEstimate(0.0, 0.0)}, START)


def use(correction: Correction[str], level: float, now: Moment, num_rounds: int = 4 * HALF_LIFE) -> None:
    for _ in range(num_rounds):
        correction.observe("shape", math.exp(level), now, 0.0)


@given(levels, levels, pauses_s, pauses_s)
def test_an_unused_correction_comes_closer_to_the_targets_and_is_doubted_more(
    level: float, towards: float, first_s: float, more_s: float
) -> None:
    correction = calibrated()
    use(correction, level, START)
    sooner = correction.level(Moment(first_s, 0), towards)
    after = correction.level(Moment(first_s + more_s, 0), towards)
    assert abs(after.mean - towards) <= abs(sooner.mean - towards) + 1e-9
    assert 0 <= sooner.variance <= after.variance + 1e-12
    assert after.variance <= PRIOR_SD**2


def test_seconds_and_rounds_of_the_target_each_make_it_older() -> None:
    correction = calibrated()
    use(correction, 1.0, START, HALF_LIFE + 2)  # short enough to count as no lasting slowness
    assert correction.level(START, 0.0).mean == pytest.approx(1.0)
    for now in (Moment(HALF_LIFE_S, 0), Moment(0.0, HALF_LIFE_ROUNDS), Moment(HALF_LIFE_S / 2, HALF_LIFE_ROUNDS // 2)):
        assert correction.level(now, 0.0).mean == pytest.approx(0.5, abs=0.05)


def test_the_target_itself_does_not_fade() -> None:
    correction = calibrated()
    for _ in range(4 * HALF_LIFE):
        correction.observe("shape", 2.0, START, None)
    level = correction.level(Moment(100 * HALF_LIFE_S, 0), None)
    assert level.factor == pytest.approx(2.0)
    assert level.variance < 0.01


@given(levels, st.floats(1, 50))
def test_after_a_pause_a_few_rounds_of_its_own_are_believed(level: float, pause: float) -> None:
    correction = calibrated()
    use(correction, 1.0, START, HALF_LIFE + 1)
    now = Moment(pause * 2 * HALF_LIFE_S, 0)
    use(correction, level, now, HALF_LIFE // 2)
    assert correction.level(now, 0.0).mean == pytest.approx(level, abs=0.05)


def test_one_slow_round_after_a_pause_is_not_believed() -> None:
    correction = calibrated()
    use(correction, 0.0, START)
    now = Moment(20 * HALF_LIFE_S, 0)
    correction.observe("shape", 100.0, now, 0.0)
    assert correction.level(now, 0.0).mean == pytest.approx(0.0)


def test_between_rounds_of_other_drafters_nothing_is_forgotten() -> None:
    correction = calibrated()
    for number in range(40 * HALF_LIFE):
        correction.observe("shape", 3.0, Moment(number * HALF_LIFE_S / 50, 0), 0.0)
    now = Moment(40 * HALF_LIFE * HALF_LIFE_S / 50, 0)
    assert correction.level(now, 0.0).factor == pytest.approx(3.0, rel=0.05)


def test_what_has_been_slow_for_long_fades_slowly_until_it_was_seen_fast() -> None:
    def left_after_a_half_life(num_slow: int, num_fast: int) -> float:
        correction = calibrated()
        use(correction, 1.0, START, num_slow)
        use(correction, 0.0, START, num_fast)
        use(correction, 1.0, START, HALF_LIFE + 2)
        return correction.level(Moment(HALF_LIFE_S, 0), 0.0).mean

    brief, lasting, over = (left_after_a_half_life(*n) for n in ((0, 0), (40 * HALF_LIFE, 0), (40 * HALF_LIFE, 64)))
    assert brief == pytest.approx(0.5, abs=0.05)
    assert lasting > 0.9
    assert over == pytest.approx(brief, abs=0.05)
