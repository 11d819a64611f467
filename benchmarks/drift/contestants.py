"""The detectors: alphaloop's and river's. Each has one strength, which sets its run length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from river import drift

from alphaloop.settings import SchedulerSettings
from benchmarks.drift.rivals import hddm_a, hddm_w, kswin, page_hinkley
from benchmarks.drift.streams import LONGEST_DELAY, Fork
from scheduler.drift.memory import Floats, JobTally, Memory, empty_memory
from scheduler.drift.phases import DriftRules, Jobs
from scheduler.drift.watching import REFERENCE_JOBS

OURS: Final = "alphaloop"
MARGIN: Final = SchedulerSettings().alpha_margin
KSWIN_WINDOW, KSWIN_RECENT = 100, 30  # river's defaults
KSWIN_BLOCK: Final = 8  # single jobs vary too much for windows of a hundred
MOST_ALARMS: Final = 10_000
MOST_STREAMS: Final = 1_000_000
FEW_STREAMS: Final = 8

Alarms = NDArray[np.int64]


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
    """The product's test; its strength is the logarithm of the run length that it is told to keep."""

    compiled: Callable[..., int]
    name: str = OURS
    strengths: Sequence[float] = tuple(math.log(jobs) for jobs in (12_500.0, 100_000.0))
    max_streams: int = MOST_STREAMS

    def detect(self, stream: Jobs, strength: float) -> Alarms:
        """The jobs with which alarms are raised."""
        return self._alarms(empty_memory(), stream, strength, MOST_ALARMS)

    def delays(self, fork: Fork, strength: float) -> list[int]:
        """As those of a rival. The part before the change is followed once."""
        before = empty_memory()
        self._alarms(before, fork.before, strength, MOST_ALARMS)
        return [first(self._alarms(_copied(before), jobs, strength, 1)) for jobs in fork.later]

    def _alarms(self, memory: Memory, stream: Jobs, strength: float, most: int) -> Alarms:
        found = np.zeros(MOST_ALARMS, dtype=np.int64)
        rules = DriftRules(math.exp(strength), REFERENCE_JOBS, MARGIN)
        return found[: self.compiled(memory, rules, stream, found, most)]


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
    found.append(Detector("HDDM_A", bounds, lambda values, bound: hddm_a(values, math.exp(-bound))))
    for fading in (0.05, 0.01):
        found.append(Detector(f"HDDM_W λ={fading}", bounds, partial(_hddm_w, fading=fading)))
    steps = tuple(np.arange(10, 28) / KSWIN_RECENT)
    found.append(Detector(f"KSWIN, means of {KSWIN_BLOCK}", steps, _kswin, FEW_STREAMS))
    return [*found, Detector("ADWIN", (0.01, 0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0, 16.0, 24.0), _adwin, FEW_STREAMS)]


def _page_hinkley(values: Floats, threshold: float, *, delta: float, alpha: float) -> Alarms:
    return page_hinkley(values, threshold, delta, alpha)  # type: ignore[no-any-return]


def _hddm_w(values: Floats, bound: float, *, fading: float) -> Alarms:
    return hddm_w(values, math.exp(-bound), fading)  # type: ignore[no-any-return]


def _kswin(values: Floats, statistic: float) -> Alarms:
    means = values[: len(values) // KSWIN_BLOCK * KSWIN_BLOCK].reshape(-1, KSWIN_BLOCK).mean(axis=1)
    found: Alarms = kswin(means, statistic - 1e-9, KSWIN_WINDOW, KSWIN_RECENT, 1)
    return (found + 1) * KSWIN_BLOCK - 1


def _adwin(values: Floats, bound: float) -> Alarms:
    detector = drift.ADWIN(delta=math.exp(-bound), clock=8)  # it looks for a cut every eight values; 32 would delay it
    found = []
    for index, value in enumerate(values.tolist()):
        detector.update(value)
        if detector.drift_detected:
            found.append(index)
    return np.array(found, dtype=np.int64)


def _copied(memory: Memory) -> Memory:
    return Memory._make(
        JobTally._make(its.copy() for its in part) if isinstance(part, JobTally) else part.copy() for part in memory
    )
