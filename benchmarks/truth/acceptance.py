"""Intervals of α over simulated jobs: unequal lengths, jobs that are alike inside, producers that send runs of jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from alphaloop.acceptance import Interval
from alphaloop.intervals import Counts, consecutive_runs, share_interval, wilson
from benchmarks.truth.coverage import Coverage, Shown, coverage

_ALPHA: Final = 0.7
_NUM_PRODUCERS: Final = 6
#: Jobs that a producer sends in a row.
_IN_A_ROW: Final = 4


def rows(num_jobs: int, num_runs: int, seed: int) -> Iterator[Coverage]:
    """The interval that is shown beside the one of before, by the correlation of a job's trials."""
    for correlation in (0.1, 0.3):
        for has_producers in (False, True):
            draws = np.random.default_rng([seed, num_jobs, round(100 * correlation), has_producers])
            drawn = [_jobs(draws, num_jobs, correlation, has_producers=has_producers) for _ in range(num_runs)]
            case = f"α .7, correlation {correlation:g}" + (", producers" if has_producers else "")
            for what, interval in (("α", share_of_runs), ("α, estimated design effect", by_design_effect)):
                yield coverage(what, case, num_jobs, (_shown(interval(jobs), truth) for jobs, truth in drawn))


def share_of_runs(jobs: Sequence[Counts]) -> Interval | None:
    """What status and the report show."""
    return share_interval(consecutive_runs(jobs))


def by_design_effect(jobs: Sequence[Counts]) -> Interval | None:
    """Wilson's interval at the trials over an estimated design effect (Kish 1965), as a comparison."""
    trials, accepts = sum(n for _, n in jobs), sum(a for a, _ in jobs)
    share = accepts / trials
    binomial = share * (1 - share) / trials
    clustered = sum((a - share * n) ** 2 for a, n in jobs) * len(jobs) / (len(jobs) - 1) / trials**2
    return wilson(share, trials / max(1.0, clustered / binomial) if binomial else len(jobs))


def _jobs(
    draws: np.random.Generator, num_jobs: int, correlation: float, *, has_producers: bool
) -> tuple[list[Counts], float]:
    """Jobs in order, and the α that they are drawn around: that of all producers of the run, by their jobs."""
    mean = np.full(num_jobs, _ALPHA)
    if has_producers:
        of_producer = np.clip(draws.normal(_ALPHA, 0.1, _NUM_PRODUCERS), 0.3, 0.95)
        turns = draws.integers(_NUM_PRODUCERS, size=math.ceil(num_jobs / _IN_A_ROW))
        mean = of_producer[np.repeat(turns, _IN_A_ROW)[:num_jobs]]
    spread = 1 / correlation - 1
    alpha = draws.beta(mean * spread, (1 - mean) * spread)
    trials = np.clip(np.rint(draws.lognormal(math.log(60), 0.8, num_jobs)), 4, 600).astype(int)
    accepts = draws.binomial(trials, alpha)
    truth = float(of_producer.mean()) if has_producers else _ALPHA
    return list(zip(accepts.tolist(), trials.tolist(), strict=True)), truth


def _shown(interval: Interval | None, truth: float) -> Shown:
    """An interval over the whole range says nothing."""
    if interval is None or (interval.low, interval.high) == (0.0, 1.0):
        return Shown(None, None, truth)
    return Shown(interval.low, interval.high, truth)
