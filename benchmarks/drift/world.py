"""Streams of decoded jobs with a known acceptance: independent, clustered, autocorrelated, or with a day's rhythm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from scheduler.drift.memory import POSITIONS, Floats, Jobs

JOBS_A_DAY: Final = 2_000
DAY_S: Final = 86_400.0
SHORTEST, LONGEST = 12, 200  # tokens of a job
WITHIN_JOB: Final = 0.1  # correlation of the trials of a job
SHARED: Final = 0.2  # share of the variance between jobs that the jobs of a cluster have in common
SERIAL: Final = 0.3  # correlation of neighbouring jobs, falling geometrically
SWING: Final = 0.05  # of α by day and by night
FALL_BY_POSITION: Final = 0.02


@dataclass(frozen=True, slots=True)
class Condition:
    """How jobs of a stream resemble each other."""

    name: str
    cluster: int = 1  #: consecutive jobs that share a part of their variance
    serial: float = 0.0
    swing: float = 0.0


CONDITIONS: Final = (
    Condition("independent"),
    Condition("clustered by 8", cluster=8),
    Condition("clustered by 32", cluster=32),
    Condition("autocorrelated", serial=SERIAL),
    Condition("day and night", swing=SWING),
)


@dataclass(frozen=True, slots=True)
class Shift:
    """A fall of α by `size` that begins after `after` jobs and is complete `over` jobs later."""

    size: float
    after: int
    over: int = 0

    def at(self, num_jobs: int) -> Floats:
        """The fall, by job."""
        since = np.arange(num_jobs) - self.after
        return self.size * np.clip((since + 1) / max(self.over, 1), 0.0, 1.0)


class Nature(NamedTuple):
    """What jobs are like before they are decoded."""

    probability: Floats  #: of acceptance at position 1
    tokens: NDArray[np.int64]
    at: Floats  #: seconds


def draw(
    condition: Condition, alpha: float, k: int, num_jobs: int, rng: np.random.Generator, shift: Shift | None = None
) -> Jobs:
    """A stream of `num_jobs` jobs, `JOBS_A_DAY` a day, from midnight."""
    its = nature(condition, alpha, num_jobs, rng)
    return decoded(its, shift.at(num_jobs) if shift is not None else np.zeros(num_jobs), k, rng)


def nature(condition: Condition, alpha: float, num_jobs: int, rng: np.random.Generator) -> Nature:
    """The nature of a steady stream."""
    own = rng.standard_normal(num_jobs)
    if condition.cluster > 1:
        common = np.repeat(rng.standard_normal(-(-num_jobs // condition.cluster)), condition.cluster)[:num_jobs]
        own = math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * own
    if condition.serial:
        own = _serial(own, condition.serial)
    at = np.arange(num_jobs, dtype=np.float64) * (DAY_S / JOBS_A_DAY)
    level = alpha + condition.swing * np.sin(2 * math.pi * at / DAY_S)
    probability = level + math.sqrt(WITHIN_JOB * alpha * (1 - alpha)) * own
    return Nature(probability, rng.integers(SHORTEST, LONGEST + 1, num_jobs), at)


def decoded(its: Nature, fall: Floats, k: int, rng: np.random.Generator) -> Jobs:
    """The jobs with their counts, after a fall of each one's α."""
    num_jobs = len(its.tokens)
    trials, accepts = np.zeros((num_jobs, POSITIONS)), np.zeros((num_jobs, POSITIONS))
    probability = np.clip(its.probability - fall, 0.02, 0.98)
    _decode(probability, its.tokens, k, int(rng.integers(2**31)), trials, accepts)
    none = np.zeros(num_jobs, dtype=np.int64)
    return Jobs(none, trials, accepts, its.tokens.astype(np.float64), its.at, none)


@numba.njit  # type: ignore[untyped-decorator]
def _serial(own: Any, correlation: float) -> Any:
    found = own.copy()
    for index in range(1, len(found)):
        found[index] = correlation * found[index - 1] + math.sqrt(1 - correlation**2) * own[index]
    return found


@numba.njit  # type: ignore[untyped-decorator]
def _decode(probability: Any, tokens: Any, k: int, seed: int, trials: Any, accepts: Any) -> None:
    np.random.seed(seed)
    for job in range(len(tokens)):
        left = tokens[job] - 1
        while left > 0:
            accepted = 0
            while accepted < k:
                # A round that ends inside its accepted tokens is censored there.
                if accepted == left:
                    break
                trials[job, accepted] += 1
                if np.random.random() >= probability[job] - FALL_BY_POSITION * accepted:
                    break
                accepts[job, accepted] += 1
                accepted += 1
            left -= accepted + 1
