"""Thresholds of the windows from a rate of false alarms.

For independent normal residuals the windows of 4·2ʲ to 8·2ʲ jobs exceed b at the rate, a job,

    φ(b) · b³/2 · ν²(b / √m) / (8·2ʲ)         ν(x) ≈ exp(-0.583 x)

(Siegmund and Venkatraman 1995, two-sided, integrated over the window lengths of a level). Every level has an equal
share of the rate. Long windows are fewer, because they overlap, so their thresholds are lower.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from scheduler.drift.memory import LEVELS, Floats

OVERSHOOT: Final = 0.583  # Siegmund 1985: mean jump of a normal walk over a boundary


def thresholds(false_alarm_jobs: float) -> Floats:
    """|Z| that raises an alarm, by level: one false alarm in `false_alarm_jobs` jobs."""
    rate = 1.0 / (false_alarm_jobs * LEVELS)
    return np.array([_threshold(rate, level) for level in range(LEVELS)])


def exceedance_rate(threshold: float, level: int) -> float:
    """Alarms a job that the windows of a level raise on a steady stream."""
    length = math.sqrt(4 * 8) * 2.0**level  # geometric middle of the level's windows
    density = math.exp(-threshold * threshold / 2) / math.sqrt(2 * math.pi)
    return density * threshold**3 / 2 * math.exp(-2 * OVERSHOOT * threshold / math.sqrt(length)) / (8.0 * 2.0**level)


def _threshold(rate: float, level: int) -> float:
    low, high = 2.0, 40.0  # the rate falls with the threshold from √3 on
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if exceedance_rate(middle, level) > rate else (low, middle)
    return high
