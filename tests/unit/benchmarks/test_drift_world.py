"""The streams of the drift benchmark are what they say: mean, correlation within a job, shared variance, shift."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.drift.memory import Floats

world = pytest.importorskip("benchmarks.drift.world", reason="the benchmark's streams are compiled with numba")


def rates(condition: str, num_jobs: int = 20_000, shift: object = None) -> Floats:
    (its,) = [one for one in world.CONDITIONS if one.name == condition]
    jobs = world.draw(its, 0.6, 3, num_jobs, np.random.default_rng(5), shift)
    found: Floats = jobs.accepts[:, 0] / np.maximum(jobs.trials[:, 0], 1)
    return found


def test_alpha_is_as_asked() -> None:
    jobs = world.draw(world.CONDITIONS[0], 0.6, 3, 20_000, np.random.default_rng(5))
    pooled = jobs.accepts[:, 0].sum() / jobs.trials[:, 0].sum()
    assert rates("independent").mean() == pytest.approx(0.6, abs=0.01)
    assert 0.5 < pooled < 0.6, "jobs with a low acceptance have more rounds"
    assert np.all(jobs.trials[:, 1] <= jobs.accepts[:, 0])


def test_a_shift_is_as_large_and_as_slow_as_asked() -> None:
    shift = world.Shift(0.2, after=10_000, over=500)
    fall = shift.at(20_000)
    assert (fall[9_999], fall[10_499], fall[-1]) == (0.0, pytest.approx(0.2), pytest.approx(0.2))
    its = rates("independent", shift=shift)
    assert its[:10_000].mean() - its[10_500:].mean() == pytest.approx(0.2, abs=0.01)


def test_neighbours_resemble_each_other_where_they_should() -> None:
    def lag_one(its: Floats) -> float:
        return float(np.corrcoef(its[:-1], its[1:])[0, 1])

    assert abs(lag_one(rates("independent"))) < 0.03
    assert lag_one(rates("autocorrelated")) > 0.15
    assert lag_one(rates("clustered by 32")) > 0.08
    days = rates("day and night").reshape(-1, world.JOBS_A_DAY)[:, : world.JOBS_A_DAY // 2]
    assert days.mean() == pytest.approx(0.6 + 2 / np.pi * world.SWING, abs=0.01)
