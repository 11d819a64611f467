"""The detectors: alphaloop's, and river's. Each has one parameter, with which its run length is set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from river import drift

from benchmarks.drift.world import DAY_S, JOBS_A_DAY
from scheduler.drift.memory import NUM_ALARMS, RAISED_AT, Floats, empty_memory
from scheduler.drift.phases import Jobs, Rules
from scheduler.drift.thresholds import thresholds

REFERENCE_JOBS: Final = 64
MARGIN: Final = 0.03
CHUNK_JOBS: Final = 64  # an alarm lasts longer, so none is overlooked
OURS: Final = "alphaloop"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A detector: `alarms` gives the indices of the jobs with which alarms are raised."""

    name: str
    alarms: Callable[[Jobs, float], list[int]]
    grid: Sequence[float]  #: parameters, from many false alarms to few
    max_streams: int  #: null streams that it can be measured on in reasonable time


def ours(fold: Callable[..., None]) -> Contestant:
    """The product's test; the parameter is the run length that it is told to keep."""

    def alarms(jobs: Jobs, run_length: float) -> list[int]:
        memory, rules = empty_memory(), Rules(thresholds(run_length), REFERENCE_JOBS, MARGIN)
        found: list[int] = []
        for begin in range(0, len(jobs.tokens), CHUNK_JOBS):
            fold(memory, rules, Jobs._make(part[begin : begin + CHUNK_JOBS] for part in jobs))
            if memory.clock[NUM_ALARMS] > len(found):
                found.append(round(memory.alarm[RAISED_AT] * JOBS_A_DAY / DAY_S))
        return found

    return Contestant(OURS, alarms, (10_000.0, 20_000.0, 40_000.0, 80_000.0), 1_000_000)


def rivals() -> list[Contestant]:
    """river's detectors, fed with each job's acceptance rate, and with means of eight jobs.

    Its detectors of the DDM family that take only errors (0 or 1) do not apply; HDDM takes any value from 0 to 1.
    """
    found = []
    for block in (1, 8):
        for delta in (0.005, 0.025, 0.05):
            found.append(
                _fed(
                    f"Page-Hinkley δ={delta}",
                    partial(_page_hinkley, delta),
                    [size / block for size in (4.0, 8.0, 16.0, 32.0, 64.0)],
                    block,
                    40,
                )
            )
        confidences = [10.0**-power for power in (2, 4, 6, 8, 11)]
        found += [
            _fed(
                "ADWIN",
                _adwin,
                confidences,
                block,
                40,
            ),
            _fed("HDDM_A", _hddm_a, confidences, block, 16),
            _fed("HDDM_W", _hddm_w, confidences, block, 16),
        ]
    return [*found, _fed("KSWIN", _kswin, [10.0**-power for power in (3, 4, 5, 6)], 8, 8)]


def _page_hinkley(delta: float, threshold: float) -> Any:
    return drift.PageHinkley(delta=delta, threshold=threshold)


def _adwin(delta: float) -> Any:
    return drift.ADWIN(delta=delta, clock=8)  # it looks for a cut every eight values; 32 would delay it


def _hddm_a(confidence: float) -> Any:
    return drift.binary.HDDM_A(drift_confidence=confidence, warning_confidence=confidence, two_sided_test=True)


def _hddm_w(confidence: float) -> Any:
    return drift.binary.HDDM_W(drift_confidence=confidence, warning_confidence=confidence, two_sided_test=True)


def _kswin(alpha: float) -> Any:
    return drift.KSWIN(alpha=alpha, seed=1)


def _fed(name: str, make: Callable[[float], Any], grid: Sequence[float], block: int, max_streams: int) -> Contestant:
    def alarms(jobs: Jobs, parameter: float) -> list[int]:
        detector = make(parameter)
        found = []
        for number, value in enumerate(rates(jobs, block).tolist()):
            detector.update(value)
            if detector.drift_detected:
                found.append((number + 1) * block - 1)
        return found

    return Contestant(name if block == 1 else f"{name}, means of {block}", alarms, grid, max_streams)


def rates(jobs: Jobs, block: int) -> Floats:
    """Accepted of tested draft tokens, by job, or as means of `block` jobs."""
    its = jobs.accepts.sum(axis=1) / np.maximum(jobs.trials.sum(axis=1), 1)
    whole = len(its) // block * block
    found: Floats = its[:whole].reshape(-1, block).mean(axis=1)
    return found
