"""The benchmark of shown intervals: few jobs show nothing, many show an interval that holds the truth."""

from __future__ import annotations

import pytest

from benchmarks.truth.__main__ import Shown, coverage


def test_runs_without_bounds_are_counted_apart() -> None:
    found = coverage("α", "case", 4, [Shown(None, None, 1.0), Shown(0.9, 1.1, 1.0), Shown(1.1, 1.2, 1.0)])
    assert (found.num_runs, found.num_shown, found.num_covered, found.num_above) == (3, 2, 1, 1)
    assert found.share == 0.5
    assert found.median_width == pytest.approx(0.15)
    assert coverage("α", "case", 4, [Shown(None, None, 1.0)]).share is None
