"""The day's rhythm: what of α goes up and down with the hour, learned from the days that were seen.

Two waves (a day and half a day) are fitted to the residuals by a ridge regression. Before a day was seen the waves are
uncertain, and this uncertainty widens the test for hours unlike those of the reference: evening jobs are compared with
a morning's reference with care, morning jobs of the next day without. A stream without a rhythm would pay for the
uncertainty of its waves for ever, so the fit is weighted by the probability that there is a rhythm at all.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from scheduler.drift.memory import FEATURES, SCALES, Floats, Memory

DAY_S: Final = 86_400.0
DEVIATIONS: Final = (0.03, 0.03, 0.015, 0.015)  # prior standard deviation of each wave, in α
LIKELY: Final = 0.9  # probability of a rhythm before jobs say
LEVEL_DEVIATION: Final = 0.1  # prior standard deviation of the level in the same regression


def features(at: float) -> Floats:
    """Cosine and sine of the time of day, for a day and for half a day; `at` in seconds since 1970, UTC."""
    angle = 2 * math.pi * (at % DAY_S) / DAY_S
    return np.array([math.cos(angle), math.sin(angle), math.cos(2 * angle), math.sin(2 * angle)])


def learn(memory: Memory, off: Floats, residual: float, information: float) -> None:
    """Add a job to the regression of residuals on the waves; `off` is how far its features are from the reference's."""
    gram, moment = memory.gram, memory.moment
    gram[0, 0] += information
    moment[0] += residual
    for i in range(FEATURES):
        gram[0, 1 + i] += information * off[i]
        gram[1 + i, 0] = gram[0, 1 + i]
        moment[1 + i] += off[i] * residual
        for j in range(FEATURES):
            gram[1 + i, 1 + j] += information * off[i] * off[j]


def solve(memory: Memory) -> None:
    """Fit the waves anew: posterior mean and covariance, with the variance of the longest scale."""
    variance = memory.variance[SCALES - 1]
    precision = memory.gram / variance
    precision[0, 0] += 1 / LEVEL_DEVIATION**2
    level = precision[0, 0]
    gain = math.log(level)
    for i in range(FEATURES):
        precision[1 + i, 1 + i] += 1 / DEVIATIONS[i] ** 2
        gain -= 2 * math.log(DEVIATIONS[i])
    covariance = np.linalg.inv(precision)
    moment = memory.moment / variance
    fitted = covariance @ moment
    # Twice the logarithm of the Bayes factor of "level and waves" against "level".
    gain += moment @ fitted - moment[0] ** 2 / level - np.linalg.slogdet(precision)[1]
    likely = 1 / (1 + (1 - LIKELY) / LIKELY * math.exp(-min(max(gain / 2, -50.0), 50.0)))
    memory.rhythm[:] = likely * fitted[1:]
    for i in range(FEATURES):
        for j in range(FEATURES):
            spread = (1 - likely) * fitted[1 + i] * fitted[1 + j]
            memory.doubt[i, j] = likely * (covariance[1 + i, 1 + j] + spread)


def wave(memory: Memory, off: Floats) -> tuple[float, float]:
    """What the rhythm adds to α so far from the reference's features, and its variance."""
    shift = 0.0
    variance = 0.0
    for i in range(FEATURES):
        shift += memory.rhythm[i] * off[i]
        for j in range(FEATURES):
            variance += off[i] * memory.doubt[i, j] * off[j]
    return shift, max(variance, 0.0)
