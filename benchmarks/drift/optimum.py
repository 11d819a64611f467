"""The yardstick: Page's CUSUM that knows level, variance and size.

No test is sooner in the worst case (Moustakides 1986). Its mean delay from a steady state follows from the Brownian
limit with Siegmund's correction (1985), for normal residuals.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.drift.world import WITHIN_JOB
from scheduler.drift.phases import Jobs


def information(stream: Jobs) -> float:
    """What a job of an independent stream says: the mean of one over the variance of its rate."""
    trials = np.maximum(stream.trials.sum(axis=1), 1)
    alpha = stream.accepts.sum() / stream.trials.sum()
    return float(np.mean(1 / (alpha * (1 - alpha) * (WITHIN_JOB + (1 - WITHIN_JOB) / trials))))


def least_delay(size: float, a_job: float, run_length: float) -> float:
    """Jobs to the alarm of two one-sided CUSUMs, for information `a_job`; each has half of the false alarms.

    Let x be the threshold as a log likelihood ratio with both overshoots, and r = size² · information / 2. The run
    length of one side is (e^x - x - 1) / r. From the height y the delay is (x - y + e^-x - e^-y) / r; in the steady
    state y is exponential with mean 1, which gives (x - 3/2 + e^-x) / r.
    """
    rate = size**2 * a_job / 2
    low, high = 0.0, 60.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if (math.exp(middle) - middle - 1) / rate < 2 * run_length else (low, middle)
    return max(1.0, (high - 1.5 + math.exp(-high)) / rate)
