"""The pipeline benchmark's statistics and its JSON line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paired import percentile
from benchmarks.pipeline.lone import LoneJob, overheads
from benchmarks.pipeline.report import (
    Overhead,
    jobs_per_s,
    ratios,
)


@given(burst=st.integers(1, 300), gap_ms=st.integers(1, 500), num_bursts=st.integers(40, 80))
def test_bursts_win_nothing(burst: int, gap_ms: int, num_bursts: int) -> None:
    appended = [gap_ms * number for number in range(num_bursts) for _ in range(burst)]
    true_rate = 1000 * burst / gap_ms
    assert jobs_per_s(appended) == pytest.approx(true_rate, rel=1.5 / (0.9 * (num_bursts - 1)))


def test_a_slow_beginning_is_left_out() -> None:
    slow, fast = range(0, 100, 20), range(100, 1001)
    assert jobs_per_s([*slow, *fast]) == pytest.approx(1000, rel=0.01)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_the_99th_of_200_is_the_third_from_the_top() -> None:
    overhead = Overhead.of([number / 1000 for number in range(1, 201)])
    assert (overhead.p50_ms, overhead.p99_ms, overhead.max_ms) == pytest.approx((100.0, 198.0, 200.0))


def test_ratios_are_by_round_and_against_the_best_peer_of_each() -> None:
    rates = {"ours": [20.0, 30.0, 40.0], "few": [10.0, 10.0, 10.0], "many": [5.0, 15.0, 20.0]}
    found = ratios(rates, ["ours"], ["few", "many"])
    assert found["ours / few"][0] == [2.0, 3.0, 4.0]
    assert found["ours / best parallel consumer"][0] == [2.0, 2.0, 2.0]
    assert found["ours / few"][1].median == 3.0
    assert ratios(rates, ["ours"], []) == {}


def test_a_lone_jobs_overheads_are_on_both_sides_of_its_step() -> None:
    sent = [LoneJob("a", 10.000, 10.050), LoneJob("b", 20.000, 20.030)]
    found = overheads(sent, {"a": (10.020, 10.021), "b": (20.010, 20.012), "warm-up": (1.0, 2.0)})
    assert found["arrival to first step"].max_ms == pytest.approx(20)
    assert found["last token to result"].max_ms == pytest.approx(29)
    assert found["last token to result"].num_jobs == 2
