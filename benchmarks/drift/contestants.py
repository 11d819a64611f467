"""Who takes part: the product's test, and river's detectors with every setting.

Page-Hinkley and HDDM_W are compiled here, ADWIN in river itself. The rules are those of river 0.26.1, value by value:
tests/unit/benchmarks/test_drift_rivals.py. Every function gives the indices of the values with which alarms are raised.
After an alarm a detector begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from river import drift

from benchmarks.drift.contest import LONGEST_DELAY, Alarms, Fork
from scheduler.drift.memory import Floats, Jobs, JobTally, Memory, empty_memory

MIN_INSTANCES: Final = 30


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
def hddm_w(values: Any, confidence: float, fading: float) -> Any:
    """Two-sided: a moving average since a cut beside the one up to it, by McDiarmid's bound."""
    found = []
    log = math.log(1 / confidence)
    # For all values, and for rises and falls up to the cut and since: number, moving average, bound.
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


OURS: Final = "alphaloop"
MOST_ALARMS: Final = 10_000
MOST_STREAMS: Final = 1_000_000
FEW_STREAMS: Final = 8


class Detector(NamedTuple):
    """A rival: it takes the rate of each job."""

    name: str
    strengths: Sequence[float]  #: from many false alarms to few
    detect: Callable[[Floats, float], Alarms]  #: from rates and a strength, the jobs with which alarms are raised

    max_streams: int = MOST_STREAMS  #: it is measured on: some take hundreds of times longer than others

    def delays(self, fork: Fork, strength: float) -> list[int]:
        """Jobs from the beginning of each change to the first alarm."""
        before = rates_of(fork.before)
        return [
            first(self.detect(np.concatenate([before, rates_of(jobs)]), strength) - len(before)) for jobs in fork.later
        ]


@dataclass(frozen=True, slots=True)
class Ours:
    """The product's test; its strength is the logarithm of the run length that it has to keep."""

    compiled: Callable[..., int]
    name: str = OURS
    strengths: Sequence[float] = tuple(math.log(jobs) for jobs in (12_500.0, 100_000.0))
    max_streams: int = MOST_STREAMS

    def detect(self, stream: Jobs, strength: float) -> Alarms:
        """The jobs with which alarms are raised."""
        return self.follow(empty_memory(), stream, strength)

    def delays(self, fork: Fork, strength: float) -> list[int]:
        """As those of a rival. The part before the change is followed once."""
        before = empty_memory()
        self.follow(before, fork.before, strength)
        return [self.delay(copied(before), jobs, strength) for jobs in fork.later]

    def delay(self, memory: Memory, stream: Jobs, strength: float) -> int:
        """Jobs to the first alarm; the memory has followed the stream until then."""
        return first(self.follow(memory, stream, strength, most=1))

    def follow(self, memory: Memory, stream: Jobs, strength: float, most: int = MOST_ALARMS) -> Alarms:
        """The jobs with which alarms are raised, until the last of `most`."""
        found = np.zeros(MOST_ALARMS, dtype=np.int64)
        return found[: self.compiled(memory, math.exp(strength), stream, found, most)]


def rates_of(stream: Jobs) -> Floats:
    """Accepted of tested draft tokens, by job."""
    found: Floats = stream.accepts.sum(axis=1) / np.maximum(stream.trials.sum(axis=1), 1)
    return found


def first(alarms: Alarms) -> int:
    """Jobs to the first alarm at or after the beginning of a change, which is job 0; at most `LONGEST_DELAY`."""
    later = alarms[alarms >= 0]
    return min(int(later[0]) + 1, LONGEST_DELAY) if len(later) else LONGEST_DELAY


def rivals() -> list[Detector]:
    """river's detectors with several settings each; the one that serves best in a condition is the one compared with.

    Its detectors of the DDM family that take only errors (0 or 1) do not apply; HDDM takes any value from 0 to 1.
    """
    thresholds = tuple(np.geomspace(0.5, 64.0, 22))
    bounds = tuple(np.geomspace(0.02, 24.0, 20))  # strengths of bounds: minus the logarithm of the confidence
    found: list[Detector] = []
    for delta in (0.0125, 0.025, 0.05, 0.1):
        found.append(Detector(f"Page-Hinkley δ={delta}", thresholds, partial(_page_hinkley, delta=delta, alpha=1.0)))
    found.append(
        Detector("Page-Hinkley δ=0.025, α=0.9999", thresholds, partial(_page_hinkley, delta=0.025, alpha=0.9999))
    )
    for fading in (0.05, 0.01):
        found.append(Detector(f"HDDM_W λ={fading}", bounds, partial(_hddm_w, fading=fading)))
    return [*found, Detector("ADWIN", (0.01, 0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0, 16.0, 24.0), _adwin, FEW_STREAMS)]


def _page_hinkley(values: Floats, threshold: float, *, delta: float, alpha: float) -> Alarms:
    return page_hinkley(values, threshold, delta, alpha)  # type: ignore[no-any-return]


def _hddm_w(values: Floats, bound: float, *, fading: float) -> Alarms:
    return hddm_w(values, math.exp(-bound), fading)  # type: ignore[no-any-return]


def _adwin(values: Floats, bound: float) -> Alarms:
    detector = drift.ADWIN(delta=math.exp(-bound), clock=8)  # it looks for a cut every eight values; 32 would delay it
    found = []
    for index, value in enumerate(values.tolist()):
        detector.update(value)
        if detector.drift_detected:
            found.append(index)
    return np.array(found, dtype=np.int64)


def copied(memory: Memory) -> Memory:
    """A memory that may be changed without this one."""
    return Memory._make(
        JobTally._make(its.copy() for its in part) if isinstance(part, JobTally) else part.copy() for part in memory
    )
