"""The evidence: its growth while nothing changes, and what widens it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.drift.memory import SIZES, Memory, empty_memory, find_noise, share, weigh

NEVER = 1e300


@pytest.fixture
def memory() -> Memory:
    """A reference of 1,000 jobs with an information of 1 and a variance of .04 each, on every scale."""
    found = empty_memory()
    found.reference.mass[0, 1] = found.reference.first[0] = 1_000.0
    found.variance[:] = 0.04
    find_noise(found, 50_000.0)
    return found


def mean(memory: Memory) -> float:
    return sum(share(step) * float(memory.evidence[:, step].sum()) for step in range(SIZES))


def test_the_shares_add_up() -> None:
    assert 2 * sum(share(step) for step in range(SIZES)) == pytest.approx(1.0)


def test_while_nothing_changes_the_evidence_grows_by_one_a_job(memory: Memory) -> None:
    """The mean over many streams of ten jobs: it is a martingale beside the number of jobs."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(4_000):
        memory.evidence[:] = 0.0
        for residual in 0.2 * rng.standard_normal(10):
            weigh(memory, NEVER, residual, 1.0, 0.0)
        found.append(mean(memory))
    assert np.mean(found) == pytest.approx(10.0, abs=4 * np.std(found) / len(found) ** 0.5)


def test_a_fall_and_a_rise_are_alike(memory: Memory) -> None:
    residuals = 0.2 * np.random.default_rng(2).standard_normal(50)
    for residual in residuals:
        weigh(memory, NEVER, residual, 1.0, 0.0)
    one = memory.evidence.copy()
    memory.evidence[:] = 0.0
    for residual in residuals:
        weigh(memory, NEVER, -residual, 1.0, 0.0)
    np.testing.assert_allclose(memory.evidence[::-1], one)


def test_a_size_that_the_reference_cannot_show_is_left_out(memory: Memory) -> None:
    # The error allows a size of √(2 ln 50,000) · .03 = .14: the two larger ones.
    for _ in range(20):
        weigh(memory, 50_000.0, -0.1, 1.0, 0.03)
    assert (memory.evidence[0] > 0).tolist() == [False, False, True, True]


def test_independent_jobs_have_one_variance_for_every_size(memory: Memory) -> None:
    np.testing.assert_allclose(memory.noise, 0.04, rtol=0.05)


def test_clusters_count_for_sizes_that_are_found_sooner_than_a_cluster_takes(memory: Memory) -> None:
    # Sums over 32 jobs vary six times as much. A fall of .2 is found in 22 jobs.
    memory.variance[:] = 0.04 * np.minimum(1 + 5 / 31 * (2.0 ** np.arange(13) - 1), 6)
    find_noise(memory, 50_000.0)
    assert memory.noise[:2] == pytest.approx(6 * 0.04, rel=0.05)
    assert np.all(memory.noise[2:] > 4 * 0.04)


@pytest.mark.parametrize("cluster", [1, 32])
def test_clusters_raise_no_more_alarms_than_wanted(memory: Memory, cluster: int) -> None:
    """A fifth of the variance is shared by the jobs of a cluster; the run length is short, so that there are alarms."""
    rng = np.random.default_rng(6)
    scales = 2.0 ** np.arange(13)
    memory.variance[:] = 0.04 * (1 + 0.2 * (np.minimum(scales, cluster) - 1))
    find_noise(memory, 500.0)
    num_jobs, num_alarms = 40_000, 0
    common = np.repeat(rng.standard_normal(num_jobs // cluster + 1), cluster)[:num_jobs]
    for residual in 0.2 * (math.sqrt(0.2) * common + math.sqrt(0.8) * rng.standard_normal(num_jobs)):
        if weigh(memory, 500.0, residual, 1.0, 0.0):
            num_alarms += 1
            memory.evidence[:] = 0.0
    assert 0 < num_alarms <= num_jobs / 500 + 2 * math.sqrt(num_jobs / 500)
