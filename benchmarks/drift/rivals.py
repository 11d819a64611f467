"""river's detectors, compiled: Page-Hinkley, HDDM_A, HDDM_W and KSWIN. ADWIN is compiled in river itself.

The rules are those of river 0.26.1, value by value: tests/unit/benchmarks/test_drift_rivals.py. KSWIN draws its sample
with other random numbers, and its threshold is the statistic that stands for its p-value. Every function gives the
indices of the values with which alarms are raised. After an alarm a detector begins anew.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np

MIN_INSTANCES: Final = 30
LEAST_STATISTIC: Final = 0.1


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def page_hinkley(values: Any, threshold: float, delta: float, alpha: float) -> Any:
    """Two-sided, with river's forgetting factor `alpha`."""
    found = []
    num, mean, up, down, least, most = 0, 0.0, 0.0, 0.0, math.inf, -1.0
    for index in range(len(values)):
        num += 1
        mean += (values[index] - mean) / num
        deviation = values[index] - mean
        up = alpha * up + deviation - delta
        down = alpha * down + deviation + delta
        least, most = min(least, up), max(most, down)
        if num >= MIN_INSTANCES and (up - least > threshold or most - down > threshold):
            found.append(index)
            num, mean, up, down, least, most = 0, 0.0, 0.0, 0.0, math.inf, -1.0
    return np.array(found, dtype=np.int64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def hddm_a(values: Any, confidence: float) -> Any:
    """Two-sided: the mean of all values beside the mean up to a cut, by Hoeffding's bound."""
    found = []
    log_1, log_2 = math.log(1 / confidence), math.log(2 / confidence)
    num, mean, low_num, low, high_num, high = 0, 0.0, 0, 0.0, 0, 0.0
    for index in range(len(values)):
        num += 1
        mean += (values[index] - mean) / num
        if low_num == 0:
            low_num, low, high_num, high = num, mean, num, mean
        bound = math.sqrt(log_1 / (2 * num))
        if low + math.sqrt(log_1 / (2 * low_num)) >= mean + bound:
            low_num, low = num, mean
        if high - math.sqrt(log_1 / (2 * high_num)) <= mean - bound:
            high_num, high = num, mean
        rose = low_num < num and mean - low >= math.sqrt((num - low_num) / low_num / num / 2 * log_2)
        fell = high_num < num and high - mean >= math.sqrt((num - high_num) / high_num / num / 2 * log_2)
        if rose or fell:
            found.append(index)
            num, mean, low_num, high_num = 0, 0.0, 0, 0
    return np.array(found, dtype=np.int64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def hddm_w(values: Any, confidence: float, fading: float) -> Any:
    """Two-sided: a moving average since a cut beside the one up to it, by McDiarmid's bound."""
    found = []
    log = math.log(1 / confidence)
    # Of all values, and for rises and falls up to the cut and since: number, moving average, bound.
    total, its = np.zeros(3), np.zeros((2, 2, 3))
    cuts = np.array([math.inf, math.inf])
    total[2] = 1.0
    its[:, :, 2] = 1.0
    for index in range(len(values)):
        _fade(total, values[index], fading)
        width = math.sqrt(total[2] * log / 2)
        is_alarm = False
        for side in range(2):
            sign = 1 - 2 * side
            if sign * total[1] + width < cuts[side]:
                cuts[side] = sign * total[1] + width
                its[side, 0] = total
                its[side, 1] = np.array([0.0, 0.0, 1.0])
            else:
                _fade(its[side, 1], values[index], fading)
            if its[side, 0, 0] > 0 and its[side, 1, 0] > 0:
                bound = math.sqrt((its[side, 0, 2] + its[side, 1, 2]) * log / 2)
                is_alarm |= sign * (its[side, 1, 1] - its[side, 0, 1]) > bound
        if is_alarm:
            found.append(index)
            total[:] = np.array([0.0, 0.0, 1.0])
            its[:, :, :2] = 0.0
            its[:, :, 2] = 1.0
            cuts[:] = math.inf
    return np.array(found, dtype=np.int64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _fade(its: Any, value: float, fading: float) -> None:
    its[1] = value if its[0] == 0 else fading * value + (1 - fading) * its[1]
    its[0] += 1
    its[2] = fading * fading + (1 - fading) ** 2 * its[2]


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def kswin(values: Any, statistic: float, window: int, recent: int, seed: int) -> Any:
    """Kolmogorov and Smirnov's statistic of the most recent values beside as many of the window's older ones."""
    np.random.seed(seed)
    found = []
    begin = 0
    order = np.arange(window - recent)
    for index in range(len(values)):
        if index + 1 - begin < window:
            continue
        older, newer = values[index + 1 - window : index + 1 - recent], np.sort(values[index + 1 - recent : index + 1])
        for i in range(recent):
            j = np.random.randint(i, window - recent)
            order[i], order[j] = order[j], order[i]
        sample = np.sort(older[order[:recent]])
        its = distance(sample, newer)
        if its > LEAST_STATISTIC and its >= statistic:
            found.append(index)
            begin = index + 1 - recent
    return np.array(found, dtype=np.int64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def distance(one: Any, other: Any) -> float:
    """The largest difference between the distribution functions of two sorted samples."""
    most, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        value = min(one[i], other[j])
        while i < len(one) and one[i] == value:
            i += 1
        while j < len(other) and other[j] == value:
            j += 1
        most = max(most, abs(i / len(one) - j / len(other)))
    return most
