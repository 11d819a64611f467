"""Run lengths and delays: every contestant is set to the same measured run length, and then meets the same changes.

The rule for all of them:

* A detector goes on after an alarm as its makers built it. Every alarm of a steady stream after the first three days is
  a false one, whether or not a person would see it.
* The first alarm at or after the beginning of a change is its detection, whatever was raised before. No stream is left
  out.
* A change without an alarm in 4,000 jobs counts as found then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.drift.contestants import Alarms
from benchmarks.drift.streams import LONGEST_DELAY, WARM_UP_JOBS
from scheduler.drift.memory import Floats

RUN_LENGTHS: Final = (10_000, 20_000, 50_000)  # jobs between two false alarms; the last one decides


@dataclass(frozen=True, slots=True)
class RunLength:
    """Jobs between two false alarms, as measured."""

    jobs: float
    low: float  #: 95 % bounds, alarms as a Poisson number
    high: float
    num_alarms: int


@dataclass(frozen=True, slots=True)
class Delays:
    """Jobs from the beginning of a change to the alarm, by stream."""

    jobs: Floats

    @property
    def mean(self) -> float:
        """Over streams."""
        return float(self.jobs.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return float(self.jobs.std(ddof=1) / math.sqrt(len(self.jobs)))

    @property
    def num_missed(self) -> int:
        """Streams without an alarm in time."""
        return int((self.jobs >= LONGEST_DELAY).sum())


@dataclass(frozen=True, slots=True)
class Counts:
    """False alarms of a contestant by strength, and the jobs among which they were."""

    strengths: Sequence[float]
    num_alarms: Sequence[int]
    num_jobs: int

    def strength_for(self, run_length: float) -> float:
        """By interpolation of the logarithm of the run length between the strengths that were measured."""
        return float(np.interp(math.log(run_length), self._logs(), self.strengths))

    def at(self, strength: float) -> RunLength:
        """The run length of a strength between those that were measured."""
        log = float(np.interp(strength, self.strengths, self._logs()))
        return run_length_of(round(self.num_jobs / math.exp(log) - 0.5), self.num_jobs)

    def _logs(self) -> Floats:
        """Logarithms of the run lengths, which never fall as the strength grows."""
        found: Floats = np.maximum.accumulate([math.log(self.num_jobs / (num + 0.5)) for num in self.num_alarms])
        return found


def count(detect: Callable[[Floats, float], Alarms], streams: Sequence[Floats], strengths: Sequence[float]) -> Counts:
    """Of a rival on the rates of steady streams: at the strengths around the wanted run lengths, found by bisection."""
    num_jobs = sum(len(rates) - WARM_UP_JOBS for rates in streams)
    found: dict[int, int] = {}

    def num_alarms(index: int) -> int:
        if index not in found:
            found[index] = sum(int((detect(rates, strengths[index]) >= WARM_UP_JOBS).sum()) for rates in streams)
        return found[index]

    for run_length in (RUN_LENGTHS[-1], RUN_LENGTHS[0]):
        low, high = 0, len(strengths) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if num_alarms(middle) < num_jobs / run_length else (middle, high)
        num_alarms(low)
        num_alarms(high)
    indices = sorted(found)
    return Counts([strengths[index] for index in indices], [found[index] for index in indices], num_jobs)


def run_length_of(num_alarms: int, num_jobs: int) -> RunLength:
    """With its bounds: Byar's approximation of the exact Poisson interval."""
    low = num_alarms * (1 - 1 / (9 * num_alarms) - 1.96 / (3 * math.sqrt(num_alarms))) ** 3 if num_alarms else 0.0
    more = num_alarms + 1
    high = more * (1 - 1 / (9 * more) + 1.96 / (3 * math.sqrt(more))) ** 3
    return RunLength(num_jobs / max(num_alarms, 0.5), num_jobs / high, num_jobs / max(low, 0.02), num_alarms)
