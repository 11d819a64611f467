"""Run lengths and delays: every contestant is set to the same measured run length, and then meets the same changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from benchmarks.drift.contestants import Contestant
from benchmarks.drift.world import Condition, Shift, draw
from scheduler.drift.phases import Jobs

ALPHAS: Final = (0.7, 0.45)
DRAFT_LENGTHS: Final = (1, 3, 5, 12)
KINDS: Final = tuple(product(ALPHAS, DRAFT_LENGTHS))
WARM_UP_JOBS: Final = 6_000  # three days
RUN_LENGTH: Final = 50_000  # jobs between two false alarms
LONGEST_DELAY: Final = 4_000  # jobs; a change that is not found counts as found then
GRADUAL_JOBS: Final = 500
SIZES: Final = (0.05, 0.10, 0.20)
NULL_SEED, SHIFT_SEED = 20_261_123, 20_261_124


@dataclass(frozen=True, slots=True)
class Calibration:
    """A contestant's parameter under a condition, and the run length measured with it."""

    parameter: float
    run_length: float
    low: float  #: 95 % bounds of the run length, alarms as a Poisson number
    high: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Jobs from the beginning of a change to the alarm."""

    mean: float
    error: float  #: standard error
    num_streams: int
    num_missed: int


def null_streams(condition: Condition, num_streams: int, num_jobs: int) -> Iterator[Jobs]:
    """Steady streams of every kind in turn."""
    for number in range(num_streams):
        alpha, k = KINDS[number % len(KINDS)]
        yield draw(condition, alpha, k, num_jobs, np.random.default_rng((NULL_SEED, number)))


def calibrate(contestant: Contestant, streams: list[Jobs]) -> Calibration:
    """The parameter at which false alarms come `RUN_LENGTH` jobs apart, by interpolation between those of the grid."""
    logs, found = [], []
    for parameter in contestant.grid:
        num_alarms, num_jobs = 0, 0
        for jobs in streams[: contestant.max_streams]:
            num_alarms += sum(at >= WARM_UP_JOBS for at in contestant.alarms(jobs, parameter))
            num_jobs += len(jobs.tokens) - WARM_UP_JOBS
        logs.append(math.log(num_jobs / (num_alarms + 0.5)))
        found.append(num_alarms)
        if logs[-1] > math.log(2 * RUN_LENGTH):
            break
    rising = np.maximum.accumulate(logs)
    wanted = min(max(math.log(RUN_LENGTH), rising[0]), rising[-1])
    parameter = math.exp(np.interp(wanted, rising, np.log(contestant.grid[: len(logs)])))
    expected = num_jobs / math.exp(wanted)
    return Calibration(
        parameter,
        math.exp(wanted),
        num_jobs / (expected + 1.96 * math.sqrt(expected)),
        num_jobs / max(expected - 1.96 * math.sqrt(expected), 0.5),
    )


def changing_streams(condition: Condition, size: float, over: int, num_streams: int) -> Iterator[tuple[Jobs, int]]:
    """Streams with a fall, and the job with which it begins: at any hour of the fourth day."""
    for number in range(num_streams):
        rng = np.random.default_rng((SHIFT_SEED, number))
        alpha, k = KINDS[number % len(KINDS)]
        after = WARM_UP_JOBS + int(rng.integers(2_000))
        yield draw(condition, alpha, k, after + LONGEST_DELAY, rng, Shift(size, after, over)), after


def delay(contestant: Contestant, parameter: float, streams: list[tuple[Jobs, int]]) -> Delay:
    """Over streams; an alarm before the change is not counted, and a stream in alarm at the change is a miss."""
    found = []
    for jobs, after in streams:
        later = [at for at in contestant.alarms(jobs, parameter) if at >= after]
        found.append(min(later[0] - after + 1, LONGEST_DELAY) if later else LONGEST_DELAY)
    return Delay(
        float(np.mean(found)),
        float(np.std(found, ddof=1) / math.sqrt(len(found))),
        len(found),
        sum(jobs >= LONGEST_DELAY for jobs in found),
    )
