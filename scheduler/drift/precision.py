"""How well the level of some jobs is known: standard errors of α_1, with the variance of their time scale."""

from __future__ import annotations

import math
from typing import Final

from scheduler.drift.memory import JOBS, SCALES, SQUARES, TRIALS, Memory, Tally

CLOSING: Final = 3.0  # standard errors within which a level is taken to be known
LONGEST_PERIOD: Final = 8192  # jobs


def is_fine(memory: Memory, tally: Tally, margin: float) -> bool:
    """Whether a tally's level is known far better than the margin, or never will be."""
    is_sure = CLOSING * standard_error(memory, tally) <= margin / 2
    return bool(is_sure or tally.first[JOBS] >= LONGEST_PERIOD)


def standard_error(memory: Memory, tally: Tally) -> float:
    """Of the mean residual of position 1 over a tally's jobs, in α."""
    first = tally.first
    scale = min(SCALES - 1, int(math.log2(first[JOBS])))
    return math.sqrt(first[SQUARES] * inflation(memory, scale)) / float(first[TRIALS])


def reference_error(memory: Memory, before: Tally, tally: Tally) -> float:
    """Of the α_1 of the jobs `before`, from the variance of the tally's jobs."""
    first = tally.first
    own = first[SQUARES] * inflation(memory, SCALES - 1) / first[TRIALS] ** 2
    return math.sqrt(own * first[JOBS] / before.first[JOBS])


def inflation(memory: Memory, scale: int) -> float:
    """By how much sums over 2^scale jobs vary more than those of independent jobs."""
    return max(1.0, float(memory.variance[scale] / memory.variance[0]))
