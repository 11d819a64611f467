"""Intervals: published values, limits, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import MOST_RUNS, Z95, consecutive_runs, share_interval, t95, wilson


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (5, 2.5705818),
        (10, 2.2281389),
        (30, 2.0422725),
        (120, 1.9799304),
    ],
)
def test_t_is_that_of_the_tables(degrees_of_freedom: float, expected: float) -> None:
    assert t95(degrees_of_freedom) == pytest.approx(expected, abs=1e-6)


def test_without_a_degree_nothing_is_bounded_and_with_many_it_is_normal() -> None:
    assert t95(0) == math.inf
    assert t95(math.inf) == pytest.approx(Z95)
    assert t95(99_999) == pytest.approx(Z95, abs=1e-4)


CLUSTERS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda p: (min(p), max(p))), max_size=60)


def test_wilsons_interval_has_its_published_values() -> None:
    # Newcombe 1998, table I: the score interval without continuity correction.
    for successes, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]:
        interval = wilson(successes / trials, trials)
        assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(CLUSTERS)
def test_an_interval_holds_its_estimate_and_is_never_narrower_than_with_independent_trials(
    clusters: list[tuple[int, int]],
) -> None:
    found, trials = share_interval(clusters), sum(n for _, n in clusters)
    if not trials:
        assert found is None
        return
    share = sum(a for a, _ in clusters) / trials
    independent = wilson(share, trials)
    assert 0 <= found.low <= independent.low + 1e-9
    assert found.mean == pytest.approx(share)
    assert found.low <= found.mean <= found.high
    assert independent.high - 1e-9 <= found.high <= 1


@given(CLUSTERS.filter(lambda clusters: any(n for _, n in clusters)))
def test_runs_keep_every_count_and_are_at_most_thirty(clusters: list[tuple[int, int]]) -> None:
    runs, tested = consecutive_runs(clusters), [one for one in clusters if one[1]]
    assert len(runs) == min(len(tested), MOST_RUNS)
    assert [sum(column) for column in zip(*runs, strict=True)] == [sum(column) for column in zip(*tested, strict=True)]
    if len(tested) <= MOST_RUNS:
        assert runs == tested


def test_one_job_tells_nothing_of_the_spread_nor_does_one_beside_tiny_ones() -> None:
    for clusters in ([(30, 40)], [(300, 400), (1, 1)]):
        found = share_interval(clusters)
        assert (found.low, found.high) == (0.0, 1.0)


def test_jobs_that_were_all_accepted_count_as_one_decision_each() -> None:
    found = share_interval([(20, 20)] * 10)
    ten = wilson(1.0, 10)
    assert found.high == 1
    assert 0 < found.low < ten.low


@pytest.mark.parametrize(("num_jobs", "correlation"), [(4, 0.3), (20, 0.1), (20, 0.3), (100, 0.1)])
def test_the_interval_holds_the_truth_of_unequal_jobs(num_jobs: int, correlation: float, seed: int) -> None:
    draws = np.random.default_rng(seed)
    covered, repeats, share, spread = 0, 400, 0.7, 1 / correlation - 1
    for _ in range(repeats):
        trials = np.clip(np.rint(draws.lognormal(3.5, 0.8, num_jobs)), 2, 300).astype(int)
        accepts = draws.binomial(trials, draws.beta(share * spread, (1 - share) * spread, num_jobs))
        found = share_interval(consecutive_runs(list(zip(accepts.tolist(), trials.tolist(), strict=True))))
        covered += found.low <= share <= found.high
    # Three standard errors of 400 runs are 3 points.
    assert 0.92 <= covered / repeats <= 0.99
