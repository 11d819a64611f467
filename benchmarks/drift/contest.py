"""The contest: steady streams count false alarms, streams with a fall count the jobs until it is found.

Beside it stands how soon any test could find the fall: the delay of the best pair of CUSUMs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.drift.world import WITHIN_JOB, Condition, Nature, Shift, decoded, draw, nature
from scheduler.drift.memory import Floats, Jobs

Alarms = NDArray[np.int64]  #: the jobs with which alarms are raised

ALPHAS: Final = (0.7, 0.45)
DRAFT_LENGTHS: Final = (1, 3, 5, 12)
KINDS: Final = tuple(product(ALPHAS, DRAFT_LENGTHS))
WARM_UP_JOBS: Final = 6_000  # three days
LONGEST_DELAY: Final = 4_000  # jobs; a change that is not found counts as found then
GRADUAL_JOBS: Final = 500
SIZES: Final = (0.05, 0.10, 0.20)
BETWEEN_SIZES: Final = (0.07, 0.14)
#: Over how many jobs, and size. The last ones lie between the sizes that the product's test is built on.
CHANGES: Final = (*product((0, GRADUAL_JOBS), SIZES), *((0, size) for size in BETWEEN_SIZES))
NULL_SEED, SHIFT_SEED = 20_261_123, 20_261_124


def kind_of(number: int) -> tuple[float, int]:
    """α_1 and draft length of a stream."""
    return KINDS[number % len(KINDS)]


def null_streams(condition: Condition, num_streams: int, num_jobs: int) -> Iterator[Jobs]:
    """Steady streams."""
    for number in range(num_streams):
        yield draw(condition, *kind_of(number), num_jobs, np.random.default_rng((NULL_SEED, number)))


class Fork(NamedTuple):
    """A stream up to the beginning of a fall, at any hour of the fourth day, and one way on for each change."""

    before: Jobs
    later: list[Jobs]


def changing_streams(condition: Condition, num_streams: int) -> Iterator[Fork]:
    """Streams with every change."""
    for number in range(num_streams):
        rng = np.random.default_rng((SHIFT_SEED, number))
        alpha, k = kind_of(number)
        after = WARM_UP_JOBS + int(rng.integers(2_000))
        its = nature(condition, alpha, after + LONGEST_DELAY, rng)
        before, later = (Nature._make(part[side] for part in its) for side in (slice(after), slice(after, None)))
        yield Fork(
            decoded(before, np.zeros(after), k, rng),
            [decoded(later, Shift(size, 0, over).at(LONGEST_DELAY), k, rng) for over, size in CHANGES],
        )


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
    """A rival's alarms on steady streams: at the strengths around the wanted run lengths, found by bisection."""
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
