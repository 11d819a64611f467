"""The day's rhythm: what of α goes up and down with the hour, learned from the days that were seen.

Two waves (a day and half a day) are fitted to the residuals by a ridge regression. Before a day was seen the waves are
uncertain, and this uncertainty widens the test for hours unlike those of the reference: evening jobs are compared with
a morning's reference with care, morning jobs of the next day without.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from scheduler.drift.memory import FEATURES, SCALES, Floats, Memory

DAY_S: Final = 86_400.0
DEVIATIONS: Final = (0.03, 0.03, 0.015, 0.015)  # prior standard deviation of each wave, in α
LEVEL_DEVIATION: Final = 0.1  # prior standard deviation of the level in the same regression


def features(at: float) -> Floats:
    """Cosine and sine of the time of day, for a day and for half a day; `at` in seconds since 1970, UTC."""
    angle = 2 * math.pi * (at % DAY_S) / DAY_S
    return np.array([math.cos(angle), math.sin(angle), math.cos(2 * angle), math.sin(2 * angle)])


def learn(memory: Memory, waves: Floats, residual: float, information: float) -> None:
    """Add a job to the regression of residuals on the waves."""
    gram, moment = memory.gram, memory.moment
    gram[0, 0] += information
    moment[0] += residual
    for i in range(FEATURES):
        gram[0, 1 + i] += information * waves[i]
        gram[1 + i, 0] = gram[0, 1 + i]
        moment[1 + i] += waves[i] * residual
        for j in range(FEATURES):
            gram[1 + i, 1 + j] += information * waves[i] * waves[j]


def solve(memory: Memory) -> None:
    """Fit the waves anew: posterior mean and covariance, with the variance of the longest scale."""
    precision = memory.gram / memory.variance[SCALES - 1]
    precision[0, 0] += 1 / LEVEL_DEVIATION**2
    for i in range(FEATURES):
        precision[1 + i, 1 + i] += 1 / DEVIATIONS[i] ** 2
    covariance = np.linalg.inv(precision)
    fitted = covariance @ (memory.moment / memory.variance[SCALES - 1])
    memory.rhythm[:] = fitted[1:]
    memory.doubt[:] = covariance[1:, 1:]


def wave(memory: Memory, waves: Floats) -> tuple[float, float]:
    """What the rhythm adds to α at these waves beside the reference, and its variance."""
    shift = 0.0
    variance = 0.0
    for i in range(FEATURES):
        off = waves[i] - memory.centre[i]
        shift += memory.rhythm[i] * off
        for j in range(FEATURES):
            variance += off * memory.doubt[i, j] * (waves[j] - memory.centre[j])
    return shift, max(variance, 0.0)
