"""The memory of a stream's test: arrays of fixed size, so that no history of jobs makes the memory larger.

The functions of this room that read and change a memory are plain loops over arrays. The benchmark compiles these
same functions.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Stored memories of another version are not read: the stream is learned anew.
VERSION: Final = 2

ROWS: Final = 16  # draft lengths told apart; all further ones share the last row
POSITIONS: Final = 16  # draft positions counted; few rounds reach deeper ones
SEGMENTS: Final = 32  # segments told apart; all further ones share the last row
SCALES: Final = 13  # blocks of 1, 2, 4 … 4096 jobs
LEVELS: Final = 10  # windows of 5 to 4096 jobs: those of level j are 4·2ʲ to 8·2ʲ jobs long
SIZES: Final = 4  # changes looked for: the margin and 2, 4 and 8 times as much
RING: Final = 9  # marks kept a level: a window of level j begins at most 8 marks ago
FEATURES: Final = 4  # cosine and sine of a day and of half a day

Floats = NDArray[np.float64]

# Indices into Memory.clock
NUM_WINDOWED, PHASE, NUM_ALARMS, NUM_JOBS = 0, 1, 2, 3
# Phases
LEARNING, WATCHING = 0, 1
# Indices into JobTally.first: jobs, and of position 1 trials, accepts, residuals and squared residuals
JOBS, TRIALS, ACCEPTS, RESIDUALS, SQUARES = 0, 1, 2, 3, 4
# Indices into Memory.alarm
DIRECTION, RAISED_AT, CHANGED_AFTER, CHANGED_BEFORE, MOVED_AFTER, MOVED_BEFORE = 0, 1, 2, 3, 4, 5


class JobTally(NamedTuple):
    """Counts of a stretch of jobs."""

    trials: Floats = np.zeros((ROWS, POSITIONS))
    accepts: Floats = np.zeros((ROWS, POSITIONS))
    mass: Floats = np.zeros((ROWS, 2))  #: tokens and information
    features: Floats = np.zeros(FEATURES)  #: Σ information · feature
    first: Floats = np.zeros(5)  #: of position 1
    segments: Floats = np.zeros((SEGMENTS, 3))  #: jobs, trials and residuals of position 1


class Memory(NamedTuple):
    """What the test remembers of a stream."""

    clock: NDArray[np.int64] = np.zeros(4, np.int64)  #: jobs in the windows, phase, alarms so far, jobs so far
    sums: Floats = np.zeros(3)  #: running sums of residuals, information and reference error
    marks: Floats = np.zeros((SCALES, RING, 4))  #: the sums and the time (s) at multiples of 2ʲ jobs
    spread: Floats = np.zeros((SCALES, 2))  #: number of reference blocks, sum of their squared sums over information
    pending_spread: Floats = np.zeros((SCALES, 2))  #: the same of the last whole period
    current_spread: Floats = np.zeros((SCALES, 2))  #: the same of the running period
    base: Floats = np.zeros(1)  #: variance of one job a unit of information, before its own says
    variance: Floats = np.zeros(SCALES)  #: variance of sums over 2ʲ jobs, a unit of information
    reference: JobTally = JobTally()  #: the level that jobs are compared with
    pending: JobTally = JobTally()  #: the last whole period, not yet in the reference
    current: JobTally = JobTally()  #: the running period
    norm: JobTally = JobTally()  #: of an open event: the reference before it
    earlier: JobTally = JobTally()  #: of an open event: jobs since its last alarm beside the norm, all whole periods
    latest: JobTally = JobTally()  #: and the running period
    norm_alpha: Floats = np.zeros(ROWS)  #: expected α_1 before the event
    norm_centre: Floats = np.zeros(FEATURES)  #: mean feature of the norm
    alpha: Floats = np.zeros((ROWS, POSITIONS))  #: expected α
    shape: Floats = np.zeros((ROWS, 2))  #: trials a token, and variance of the row's level in the reference
    gram: Floats = np.zeros((1 + FEATURES, 1 + FEATURES))  #: Σ information · feature · feature
    moment: Floats = np.zeros(1 + FEATURES)  #: Σ feature · residual
    rhythm: Floats = np.zeros(FEATURES)  #: the day's rhythm, in α
    centre: Floats = np.zeros(FEATURES)  #: mean feature of the reference
    doubt: Floats = np.zeros((FEATURES, FEATURES))  #: covariance of `rhythm`
    evidence: Floats = np.zeros((2, SIZES))  #: for a fall and for a rise of each size
    noise: Floats = np.zeros(SIZES)  #: variance with which a size keeps the run length, a unit of information
    alarm: Floats = np.zeros(6)  #: direction of the open event (0: none), times (s) of the last alarm, around the
    #: event's beginning and around the last change


def empty_tally() -> JobTally:
    """No jobs."""
    return JobTally(*(part.copy() for part in JobTally()))


def empty_memory() -> Memory:
    """A stream of which nothing was read."""
    return Memory._make(empty_tally() if isinstance(part, JobTally) else part.copy() for part in Memory())


def is_open(memory: Memory) -> bool:
    """Whether an alarm has not ended."""
    return bool(memory.alarm[DIRECTION] != 0)


def to_document(memory: Memory | JobTally) -> dict[str, Any]:
    """As JSON keeps it: numbers in nested lists."""
    return {
        name: to_document(part) if isinstance(part, JobTally) else part.tolist()
        for name, part in memory._asdict().items()
    }


def from_document(document: Any) -> Memory:
    """The inverse of `to_document`. Raises KeyError, TypeError or ValueError for anything else."""
    return Memory._make(
        JobTally._make(_array(document[name][field], like) for field, like in part._asdict().items())
        if isinstance(part, JobTally)
        else _array(document[name], part)
        for name, part in Memory()._asdict().items()
    )


def _array(found: Any, like: NDArray[Any]) -> NDArray[Any]:
    made = np.array(found, dtype=like.dtype)
    if made.shape != like.shape or not np.isfinite(made).all():
        raise ValueError(f"expected {like.shape} finite numbers, found {made.shape}")
    return made
