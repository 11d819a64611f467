"""The life of a stream's test, a job at a time: learning, watching, in alarm.

* Learning: the first jobs are the reference.
* Watching: each job is compared with the reference, which is lagged. A stretch of jobs (a period) joins it when the
  next period is over without an alarm, so a change is not absorbed before it can be seen.
* In alarm: the reference stays as it was. Periods of later jobs are compared with it. A period whose difference surely
  lies within the margin (equivalence at three standard errors) ends the alarm; nothing else does, so a lasting fall is
  one event. If the difference is small but real, that period becomes the reference.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.drift.memory import (
    ACCEPTS,
    ALARMED,
    JOBS,
    LEARNING,
    NUM_JOBS,
    PHASE,
    POSITIONS,
    RESIDUALS,
    SCALES,
    SQUARES,
    TRIALS,
    WATCHING,
    Floats,
    Memory,
    Tally,
)
from scheduler.drift.reference import clear, count, count_first, merge, settle, weight
from scheduler.drift.rhythm import features, learn, solve, wave
from scheduler.drift.scales import advance, clear_windows, estimate_variances, forget_blocks, join_blocks
from scheduler.drift.windows import look

WINSOR: Final = 3.5  # residuals of short jobs are skewed; one job alone must not raise an alarm
BETWEEN_LOOKS: Final = 32  # jobs between two fits of the rhythm, and two looks at a period
SHORTEST_PERIOD: Final = 64  # jobs
LONGEST_PERIOD: Final = 8192  # jobs
CLOSING: Final = 3.0  # standard errors of the equivalence that ends an alarm
LEAST_TRIALS: Final = 1.0


class Jobs(NamedTuple):
    """A page of a stream's jobs in their order, a row a job."""

    rows: NDArray[np.int64]  #: draft length, as a row of the tables
    trials: Floats  #: [num_jobs, POSITIONS]
    accepts: Floats  #: [num_jobs, POSITIONS]
    tokens: Floats
    at: Floats  #: seconds since 1970, UTC
    segments: NDArray[np.int64]  #: segment, as a row of the tallies


class Rules(NamedTuple):
    """The settings of the test."""

    thresholds: Floats  #: by level
    reference_jobs: int
    margin: float  #: in α


def fold(memory: Memory, rules: Rules, jobs: Jobs) -> None:
    """Add jobs to the memory, one after the other. Jobs without a trial say nothing and are passed over."""
    for index in range(len(jobs.tokens)):
        if jobs.trials[index, 0] >= LEAST_TRIALS:
            follow(memory, rules, jobs, index)


def follow(memory: Memory, rules: Rules, jobs: Jobs, index: int) -> None:
    """Add one job."""
    memory.clock[NUM_JOBS] += 1
    if memory.clock[PHASE] == LEARNING:
        study(memory, jobs, index)
        if memory.current.first[JOBS] >= rules.reference_jobs:
            begin(memory, jobs.at[index])
        return
    compare(memory, rules, jobs, index)
    num_jobs = memory.current.first[JOBS]
    if num_jobs == 0 or num_jobs % BETWEEN_LOOKS:
        return
    if memory.clock[PHASE] == WATCHING:
        solve(memory)
    if num_jobs >= SHORTEST_PERIOD:
        look_back(memory, rules, jobs.at[index])


def look_back(memory: Memory, rules: Rules, at: float) -> None:
    """Look at the running period as a whole."""
    if memory.clock[PHASE] == ALARMED:
        judge(memory, rules, at)
    elif is_over(memory, rules):
        turn(memory)


def study(memory: Memory, jobs: Jobs, index: int) -> None:
    """Count a job of the first reference."""
    row, trials, accepts = jobs.rows[index], jobs.trials[index], jobs.accepts[index]
    tested = trials.sum()
    information = tested * weight(tested)
    count(memory.current, row, trials, accepts, jobs.tokens[index], information, features(jobs.at[index]))
    count_first(memory.current, jobs.segments[index], trials[0], accepts[0], accepts[0])


def begin(memory: Memory, at: float) -> None:
    """Make the studied jobs the reference, and begin to watch."""
    level = memory.current.accepts.sum() / memory.current.trials.sum()
    memory.base[0] = max(level * (1 - level), 0.01)
    estimate_variances(memory)
    first, segments = memory.current.first, memory.current.segments
    alpha_1 = first[ACCEPTS] / first[TRIALS]
    segments[:, 2] -= alpha_1 * segments[:, 1]
    first[RESIDUALS] = 0.0
    rebase(memory, at)


def rebase(memory: Memory, at: float) -> None:
    """Make the running period the reference, and watch."""
    clear(memory.reference)
    merge(memory.reference, memory.current)
    clear(memory.pending)
    resume(memory, at)


def resume(memory: Memory, at: float) -> None:
    """Watch from here on, with new windows."""
    clear(memory.current)
    forget_blocks(memory)
    settle(memory)
    solve(memory)
    clear_windows(memory, at)
    memory.clock[PHASE] = WATCHING


def compare(memory: Memory, rules: Rules, jobs: Jobs, index: int) -> None:
    """Count a job beside what the reference expects; while watching, test."""
    row, trials, accepts = jobs.rows[index], jobs.trials[index], jobs.accepts[index]
    mass = jobs.tokens[index] * memory.shape[row, 0]
    information = mass * weight(mass)
    waves = features(jobs.at[index])
    shift, doubt = wave(memory, waves)
    residual = 0.0
    for i in range(POSITIONS):
        residual += accepts[i] - trials[i] * memory.alpha[row, i]
    residual *= weight(mass)
    first = accepts[0] - trials[0] * (memory.alpha[row, 0] + shift)
    count(memory.current, row, trials, accepts, jobs.tokens[index], information, waves)
    count_first(memory.current, jobs.segments[index], trials[0], accepts[0], first)
    if memory.clock[PHASE] == ALARMED:
        return
    limit = WINSOR * math.sqrt(memory.variance[0] * information)
    rest = min(max(residual - information * shift, -limit), limit)
    learn(memory, waves, rest + information * shift, information)
    error = information * math.sqrt(memory.shape[row, 1] + doubt)
    advance(memory, rest, information, error, jobs.at[index])
    if look(memory, rules.thresholds, jobs.at[index]) != 0:
        clear(memory.pending)
        clear(memory.current)
        forget_blocks(memory)


def turn(memory: Memory) -> None:
    """End a period of watching: the period before it joins the reference."""
    merge(memory.reference, memory.pending)
    clear(memory.pending)
    merge(memory.pending, memory.current)
    clear(memory.current)
    join_blocks(memory)
    settle(memory)


def is_over(memory: Memory, rules: Rules) -> bool:
    """Whether the running period of watching is over.

    It is as long as a short reference, which has to keep up with the day, or long enough for the margin.
    """
    num_jobs = memory.current.first[JOBS]
    return bool(num_jobs >= memory.reference.first[JOBS] or is_fine(memory, rules))


def is_fine(memory: Memory, rules: Rules) -> bool:
    """Whether the running period's level is known far better than the margin, or never will be."""
    is_sure = CLOSING * standard_error(memory, memory.current) <= rules.margin / 2
    return bool(is_sure or memory.current.first[JOBS] >= LONGEST_PERIOD)


def judge(memory: Memory, rules: Rules, at: float) -> None:
    """End the alarm if the running period shows the level of the reference; renew the period if it shows another."""
    first = memory.current.first
    change, error = first[RESIDUALS] / first[TRIALS], standard_error(memory, memory.current)
    doubt = reference_error(memory, memory.current)
    if abs(change) + CLOSING * error <= max(rules.margin, CLOSING * doubt):
        if abs(change) > 2 * math.sqrt(error**2 + doubt**2):
            rebase(memory, at)
        else:
            # It is the evidence of steadiness, and joins the reference as every period does.
            clear(memory.pending)
            merge(memory.pending, memory.current)
            resume(memory, at)
    elif abs(change) - CLOSING * error > rules.margin or is_fine(memory, rules):
        merge(memory.pending, memory.current)
        clear(memory.current)


def standard_error(memory: Memory, tally: Tally) -> float:
    """Of the mean residual of position 1 over a tally's jobs, in α."""
    first = tally.first
    scale = min(SCALES - 1, int(math.log2(first[JOBS])))
    return math.sqrt(first[SQUARES] * inflation(memory, scale)) / float(first[TRIALS])


def reference_error(memory: Memory, tally: Tally) -> float:
    """Of the reference's α_1, from the variance of the tally's jobs."""
    first = tally.first
    own = first[SQUARES] * inflation(memory, SCALES - 1) / first[TRIALS] ** 2
    return math.sqrt(own * first[JOBS] / memory.reference.first[JOBS])


def inflation(memory: Memory, scale: int) -> float:
    """By how much sums over 2^scale jobs vary more than those of independent jobs."""
    return max(1.0, float(memory.variance[scale] / memory.variance[0]))
