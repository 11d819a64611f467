"""95 % intervals: quantiles of Student's t, and a share, such as α, of trials that come in clusters. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from statistics import NormalDist
from typing import Final, TypeAlias

from alphaloop.acceptance import Z95, Interval

#: Beyond it the normal quantile is right to four digits.
_NEARLY_NORMAL: Final = 1e5
_TINY: Final = 1e-300


def t95(degrees_of_freedom: float) -> float:
    """The t that a variate with so many degrees of freedom exceeds in absolute value in 5 % of cases."""
    return t_quantile(degrees_of_freedom, 0.05)


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, tail: float) -> float:
    """The t that such a variate exceeds in absolute value with the probability `tail`.

    Infinite without a degree of freedom. By bisection on the tail, I_x(ν/2, ½) with x = ν / (ν + t²) (DLMF 8.17).
    """
    if degrees_of_freedom <= 0:
        return math.inf
    if degrees_of_freedom >= _NEARLY_NORMAL:
        return NormalDist().inv_cdf(1 - tail / 2)
    low, high = 0.0, 1.0
    while two_sided_tail(high, degrees_of_freedom) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if two_sided_tail(middle, degrees_of_freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def two_sided_tail(t: float, degrees_of_freedom: float) -> float:
    """P(|T| > t)."""
    return _incomplete_beta(degrees_of_freedom / (degrees_of_freedom + t * t), degrees_of_freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction (DLMF 8.17.22) in the half where that converges quickly."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d₁/(1 + d₂/(1 + …))), by Lentz's method as modified by Thompson and Barnett (1986)."""
    value = numerator = 1.0
    denominator = 0.0
    for i in range(500):
        m = i // 2
        if i == 0:
            d = 1.0
        elif i % 2 == 0:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        denominator = 1 / _away_from_zero(1 + d * denominator)
        numerator = _away_from_zero(1 + d / numerator)
        step = numerator * denominator
        value *= step
        if i and abs(step - 1) < 1e-14:
            break
    return value - 1


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


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

    The variance of Σa / Σn over clusters is the linearised one (Cochran 1977, §6.4). Every residual is divided by one
    less the cluster's share of the trials, because a large cluster pulls the estimate towards itself (HC3: MacKinnon
    and White 1985; about the jackknife). The degrees of freedom are the effective number of clusters (Σn)² / Σn² (Kish
    1965), less one. Both become an effective number of trials (Korn and Graubard 1998), and the interval is Wilson's
    (1927). `make bench-truth` measures how often it holds the truth (docs/concepts/acceptance.md).
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
