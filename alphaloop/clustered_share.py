"""A share, such as α, and its 95 % interval, when trials come in clusters: the tokens of a job are alike.

The variance of Σa / Σn over clusters is the linearised one (Cochran 1977, §6.4). Every residual is divided by one less
the cluster's share of the trials, because a large cluster pulls the estimate towards itself (HC3: MacKinnon and White
1985; about the jackknife). The degrees of freedom are the effective number of clusters (Σn)² / Σn² (Kish 1965), less
one. Both become an effective number of trials (Korn and Graubard 1998), and the interval is Wilson's (1927).
`make bench-truth` measures how often it holds the truth (docs/concepts/acceptance.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final, TypeAlias

from alphaloop.acceptance import Z95, Interval
from alphaloop.switchback.student import t95

#: Accepts and trials of a cluster.
Counts: TypeAlias = tuple[int, int]

#: Clusters that consecutive jobs are put into. Neighbours may be alike beyond a job, because a producer sends several:
#: the means of 10 to 30 long runs of a stream are nearly independent (Schmeiser 1982).
MOST_RUNS: Final = 30
#: Degrees of freedom below which nothing is known about the spread.
_LEAST_DEGREES: Final = 0.25


def share_interval(clusters: Sequence[Counts]) -> Interval | None:
    """Σ accepts / Σ trials with its 95 % interval; None without a trial.

    Clusters are independent of each other; those without a trial do not count. The interval is the whole range where
    one cluster holds nearly all trials.
    """
    tested = [(accepts, trials) for accepts, trials in clusters if trials]
    if not tested:
        return None
    num_trials = sum(trials for _, trials in tested)
    share = sum(accepts for accepts, _ in tested) / num_trials
    num_effective = num_trials**2 / sum(trials * trials for _, trials in tested)
    degrees_of_freedom = num_effective - 1
    if degrees_of_freedom < _LEAST_DEGREES:
        return Interval(share, 0.0, 1.0)
    binomial = share * (1 - share)
    variance = max(_variance(tested, share, num_trials), binomial / num_trials)
    # Where all or nothing was accepted no spread can be seen: a cluster may then be one decision.
    effective_trials = binomial / variance if variance else num_effective
    return wilson(share, effective_trials * (Z95 / t95(degrees_of_freedom)) ** 2)


def consecutive_runs(jobs: Sequence[Counts]) -> list[Counts]:
    """Jobs in the order of their decoding, put together into at most `MOST_RUNS` runs of about equal length."""
    tested = [job for job in jobs if job[1]]
    num_runs = min(len(tested), MOST_RUNS)
    numbered = ((index * num_runs // len(tested), job) for index, job in enumerate(tested))
    runs = ([job for _, job in run] for _, run in groupby(numbered, key=lambda pair: pair[0]))
    return [(sum(accepts for accepts, _ in run), sum(trials for _, trials in run)) for run in runs]


def wilson(share: float, trials: float) -> Interval:
    """95 % score interval of a share of so many independent trials, which need not be whole (Wilson 1927)."""
    if trials <= 0:
        return Interval(share, 0.0, 1.0)
    centre = (share + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    margin = Z95 / (1 + Z95**2 / trials) * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials * trials))
    return Interval(share, max(0.0, min(share, centre - margin)), min(1.0, max(share, centre + margin)))


def _variance(clusters: Sequence[Counts], share: float, num_trials: int) -> float:
    moved = [(accepts - share * trials) / (num_trials - trials) for accepts, trials in clusters]
    return (len(clusters) - 1) / len(clusters) * sum(one * one for one in moved)
