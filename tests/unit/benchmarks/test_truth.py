"""The benchmark of shown intervals: few jobs show nothing, many show an interval that holds the truth."""

from __future__ import annotations

import pytest

from benchmarks.truth.__main__ import Shown, acceptance_rows, coverage, measure_rows


def test_runs_without_bounds_are_counted_apart() -> None:
    found = coverage("α", "case", 4, [Shown(None, None, 1.0), Shown(0.9, 1.1, 1.0), Shown(1.1, 1.2, 1.0)])
    assert (found.num_runs, found.num_shown, found.num_covered, found.num_above) == (3, 2, 1, 1)
    assert found.share == 0.5
    assert found.median_width == pytest.approx(0.15)
    assert coverage("α", "case", 4, [Shown(None, None, 1.0)]).share is None


def test_the_shown_interval_of_few_jobs_holds_the_truth() -> None:
    found = list(acceptance_rows(8, 50, 1))
    assert len(found) == 4
    for one in found:
        assert one.num_covered >= 0.88 * one.num_shown


def test_measure_bounds_nothing_of_four_prompts_and_holds_the_truth_of_twenty() -> None:
    assert {one.num_shown for one, _ in measure_rows(4, 5, 1)} == {0}
    for one, _ in measure_rows(20, 24, 1):
        assert one.num_shown == 24
        assert one.num_covered >= 20
