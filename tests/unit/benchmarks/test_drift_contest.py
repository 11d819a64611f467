"""The drift benchmark: its streams are what they say, and how it counts run lengths, strengths and delays."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.drift.memory import Floats

world = pytest.importorskip("benchmarks.drift.world", reason="the benchmark is compiled with numba")
contest = pytest.importorskip("benchmarks.drift.contest", reason="the benchmark is compiled with numba")


def rates(condition: str, shift: object = None) -> Floats:
    (its,) = [one for one in world.CONDITIONS if one.name == condition]
    jobs = world.draw(its, 0.6, 3, 20_000, np.random.default_rng(5), shift)
    return jobs.accepts[:, 0] / np.maximum(jobs.trials[:, 0], 1)


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


def test_a_strength_lies_between_those_around_the_wanted_run_length() -> None:
    counts = contest.Counts([1.0, 2.0, 3.0], [400, 100, 10], 1_000_000)
    assert 1.0 < counts.strength_for(5_000) < 2.0 < counts.strength_for(20_000) < 3.0
    assert counts.at(2.0).num_alarms == 100


@pytest.mark.parametrize(("alarms", "low", "high"), [(0, 0.0, 3.69), (10, 4.80, 18.39), (100, 81.36, 121.6)])
def test_the_bounds_of_a_run_length_are_those_of_a_poisson_number(alarms: int, low: float, high: float) -> None:
    found = contest.run_length_of(alarms, 1_000)
    assert 1_000 / found.high == pytest.approx(low, rel=0.02, abs=0.03)
    assert 1_000 / found.low == pytest.approx(high, rel=0.02)


def test_the_least_delay_is_that_of_a_cusum_on_normal_values() -> None:
    """A CUSUM for a shift of .6 standard deviations, on a sample."""
    rng = np.random.default_rng(8)

    def cusum(values: np.ndarray, threshold: float) -> list[int]:
        found, up, down = [], 0.0, 0.0
        for index, value in enumerate(values.tolist()):
            up, down = max(0.0, up + 0.6 * value - 0.18), max(0.0, down - 0.6 * value - 0.18)
            if max(up, down) > threshold:
                found.append(index)
                up = down = 0.0
        return found

    # The threshold of a run length of 2,000: between 1,600 and 2,500 here.
    num = len(cusum(rng.standard_normal(200_000), 5.93))
    assert 80 < num < 125
    delays = []
    for _ in range(300):
        values = rng.standard_normal(400)
        values[200:] += 0.6
        delays.append(next(index for index in cusum(values, 5.93) if index >= 200) - 199)
    expected = contest.least_delay(0.6, 1.0, 2_000)
    assert np.mean(delays) == pytest.approx(expected, abs=3 * np.std(delays) / 300**0.5 + 0.5)
