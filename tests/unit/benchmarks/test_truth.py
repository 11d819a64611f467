"""The benchmarks of shown intervals: few jobs show nothing, and what is shown holds the truth, or what comes."""

from __future__ import annotations

import pytest

from benchmarks.truth.__main__ import Shown, coverage
from benchmarks.truth.first_jobs import NUM_SEEN, compared, cut, simulated, summary


def test_runs_without_bounds_are_counted_apart() -> None:
    found = coverage("α", "case", 4, [Shown(None, None, 1.0), Shown(0.9, 1.1, 1.0), Shown(1.1, 1.2, 1.0)])
    assert (found.num_runs, found.num_shown, found.num_covered, found.num_above) == (3, 2, 1, 1)
    assert found.share == 0.5
    assert found.median_width == pytest.approx(0.15)
    assert coverage("α", "case", 4, [Shown(None, None, 1.0)]).share is None


@pytest.mark.parametrize(
    ("k", "goes_on", "rounds", "accepts"),
    [
        (8, True, 4, (2, 1, 1, 1, 1, 1, 1)),
        (3, True, 5, (3, 2, 2)),  # 7 accepted tokens are 3, the target's own, and 3 more
        (3, False, 4, (2, 1, 1)),
    ],
)
def test_a_cut_copy_goes_on_in_the_next_round(k: int, goes_on: bool, rounds: int, accepts: tuple[int, ...]) -> None:
    counts = cut([(0, 1), (7, 8), (1, 8)], 12 if goes_on else 8, k, goes_on=goes_on)
    assert (counts.rounds, counts.accepts[: len(accepts)]) == (rounds, accepts)
    assert counts.num_tokens == (12 if goes_on else 8)


def test_first_expectations_hold_what_is_measured_later() -> None:
    rows = simulated(100, 3)
    found = summary(rows)
    assert found["compared"] == found["shown"] == 100 * len(NUM_SEEN)
    assert 0.9 < found["share"] < 1
    assert summary([one for one in rows if one.num_seen == 16])["median_high_over_low"] < 2


def test_what_was_not_shown_is_not_held() -> None:
    assert not compared("legal", 4, None, 1.0).is_held
