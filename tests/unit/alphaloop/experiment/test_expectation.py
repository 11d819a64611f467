"""Pairs of expected and measured speed-ups, and how they are counted and told."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.acceptance import Z95
from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.figures import ExpectationPair, by_drafter, expectation_pair, reliability
from alphaloop.experiment.observe import Expected, Phase, RoundFacts, Slice, TaskRound, Treatment, mean_expected
from alphaloop.experiment.wording import expectations, expectations_of_all
from tests.fixtures.runs import block_rows, subject

NOW = datetime(2026, 3, 1, tzinfo=UTC)
SMALL, LARGE = Expected(1.2, 1.0, 1.4, 1.3, 0.05), Expected(1.8, 1.4, 2.2, 1.9, 0.15)


def slices(num_blocks: int, expected: Expected | None = SMALL, *, start: datetime = NOW) -> list[Slice]:
    """Twice as fast as vanilla."""
    return [row.slice for row in block_rows(subject(), start, num_blocks, expected=expected)]


def pair_of(found: list[Slice]) -> ExpectationPair:
    return expectation_pair(subject(), found, NOW)


def test_a_round_counts_expectations_by_its_time_and_its_sequences() -> None:
    one = Slice("b", "code", Phase.BETWEEN, Treatment("lookup", 4), NOW)
    for wall_s, num, expected in ((0.1, 4, SMALL), (0.3, 2, LARGE), (0.5, 1, None)):
        facts = RoundFacts(NOW, wall_s, num, 100.0, has_prompt=num == 2, tasks={})
        one.add(facts, TaskRound(num, num, expected=expected))
    assert one.expected_sequence_s == pytest.approx(0.4 + 0.6)
    assert one.expected_vanilla_s == pytest.approx(0.4 * 1.2 + 0.6 * 1.8)
    assert one.expected_low_s == pytest.approx(0.4 * 1.0 + 0.6 * 1.4)
    assert one.expected_high_s == pytest.approx(0.4 * 1.4 + 0.6 * 2.2)
    assert one.uncorrected_vanilla_s == pytest.approx(0.4 * 1.3 + 0.6 * 1.9)
    assert one.model_sd_s == pytest.approx(0.4 * 0.05 + 0.6 * 0.15)


def test_sequences_that_run_together_have_the_mean_of_their_expectations() -> None:
    assert mean_expected([]) is None
    assert mean_expected([SMALL, LARGE]) == pytest.approx((1.5, 1.2, 1.8, 1.6, 0.1))


def test_a_pair_is_the_mean_expectation_beside_the_speed_up_of_the_same_slices() -> None:
    found = slices(5, SMALL) + slices(5, LARGE, start=NOW + timedelta(minutes=1))
    pair = pair_of(found)
    assert (pair.expected.mean, pair.expected.low, pair.expected.high) == pytest.approx((1.5, 1.2, 1.8))
    assert (pair.uncorrected, pair.model_sd) == pytest.approx((1.6, 0.1))
    assert pair.measured == measured_speedup(found).speedup
    assert not pair.is_held
    assert pair.log_ratio == pytest.approx(math.log(2 / 1.5), abs=0.01)
    assert pair.log_error == pytest.approx(math.log(2 / 1.6), abs=0.01)
    width = math.log(pair.measured.high / pair.measured.low) / 2 / Z95
    assert pair.variance == pytest.approx(0.1**2 + width**2)
    assert (pair.num_blocks, pair.covers_from, pair.covers_to) == (10, NOW, max(one.started_at for one in found))


def test_without_enough_blocks_or_expectations_there_is_no_pair() -> None:
    assert expectation_pair(subject(), slices(7), NOW) is None
    assert expectation_pair(subject(), slices(8, None), NOW) is None
    rarely_expected = slices(3) + slices(9, None, start=NOW + timedelta(minutes=1))
    assert expectation_pair(subject(), rarely_expected, NOW) is None
    mostly_expected = slices(9) + slices(3, None, start=NOW + timedelta(minutes=1))
    assert pair_of(mostly_expected).expected.mean == pytest.approx(1.2)


def test_reliability_counts_what_was_held_and_says_how_far_off_it_was() -> None:
    missed, held = pair_of(slices(8, SMALL)), pair_of(slices(8, LARGE))
    (one,) = [reliability(its) for its in by_drafter([missed, held, held]).values()]
    ratio = (missed.measured.mean / 1.2 * (held.measured.mean / 1.8) ** 2) ** (1 / 3)
    assert (one.num_pairs, one.num_held, one.ratio) == (3, 2, pytest.approx(ratio))
    assert one.ratio_bounds[0] < ratio < one.ratio_bounds[1]
    assert reliability([held]).ratio_bounds is None
    assert expectations(one).startswith("Expected speed-ups of lookup (k up to 4, 4.0 running): 2 of 3 intervals held")
    chat = replace(reliability([held]), task="chat")
    told = "Expected speed-ups of the last 7 days: 3 of 4 intervals held the measured one "
    assert expectations_of_all([chat, one]) == told + "(chat 1 of 1 with lookup, code 2 of 3 with lookup)."
    assert expectations_of_all([]) == ""
