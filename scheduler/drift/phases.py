"""The life of a stream's test, a job at a time: learning, then watching, with or without an open event.

* Learning: the first jobs are the reference.
* Watching: each job is compared with the reference, which is lagged. A stretch of jobs (a period) joins it when the
  next period is over without an alarm, so a change is not absorbed before it can be seen.
* An alarm opens an event. What was the reference is the norm now; the stream is learned anew, and watched at its new
  level, so that a further change raises an alarm of its own. It belongs to the same event.

`scheduler.drift.events` compares the new level with the norm and ends the event.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from numpy import int64
from numpy.typing import NDArray

from scheduler.drift.events import is_like_norm, judge, raise_alarm, recall, turn_round
from scheduler.drift.memory import (
    ACCEPTS,
    JOBS,
    LEARNING,
    NUM_JOBS,
    PHASE,
    POSITIONS,
    RESIDUALS,
    TRIALS,
    WATCHING,
    Floats,
    Memory,
    is_open,
)
from scheduler.drift.precision import is_fine
from scheduler.drift.reference import clear, count, count_first, merge, settle, weight
from scheduler.drift.rhythm import features, learn, solve, wave
from scheduler.drift.scales import advance, clear_windows, estimate_variances, forget_blocks, join_blocks
from scheduler.drift.shifts import find_noise, weigh

WINSOR: Final = 3.5  # residuals of short jobs are skewed; one job alone must not raise an alarm
BETWEEN_LOOKS: Final = 32  # jobs between two fits of the rhythm, and two looks at a period
SHORTEST_PERIOD: Final = 64  # jobs
LEAST_TRIALS: Final = 1.0


class Jobs(NamedTuple):
    """A page of a stream's jobs in their order, a row a job."""

    rows: NDArray[int64]  #: draft length, as a row of the tables
    trials: Floats  #: [num_jobs, POSITIONS]
    accepts: Floats  #: [num_jobs, POSITIONS]
    tokens: Floats
    at: Floats  #: seconds since 1970, UTC
    segments: NDArray[int64]  #: segment, as a row of the tallies


class Rules(NamedTuple):
    """The settings of the test."""

    run_length: float  #: jobs between two false alarms
    reference_jobs: int
    margin: float  #: in α: the smallest change that matters


def fold(memory: Memory, rules: Rules, jobs: Jobs) -> None:
    """Add jobs to the memory, one after the other. Jobs without a trial say nothing and are passed over."""
    for index in range(len(jobs.tokens)):
        if jobs.trials[index, 0] >= LEAST_TRIALS:
            follow(memory, rules, jobs, index)


def follow(memory: Memory, rules: Rules, jobs: Jobs, index: int) -> None:
    """Add one job."""
    memory.clock[NUM_JOBS] += 1
    if is_open(memory):
        recall(memory, jobs.rows[index], jobs.trials[index], jobs.accepts[index], jobs.tokens[index],
               features(jobs.at[index]), jobs.segments[index])  # fmt: skip
    if memory.clock[PHASE] == LEARNING:
        study(memory, jobs, index)
        if memory.current.first[JOBS] >= rules.reference_jobs:
            begin(memory, rules, jobs.at[index])
        return
    if compare(memory, rules, jobs, index):
        raise_alarm(memory, jobs.at[index])
        learn_anew(memory)
    elif memory.current.first[JOBS] % BETWEEN_LOOKS == 0:
        look_back(memory, rules, jobs.at[index])


def look_back(memory: Memory, rules: Rules, at: float) -> None:
    """Look at the running period as a whole."""
    solve(memory)
    if is_open(memory) and judge(memory, rules.margin):
        clear(memory.pending)
        clear(memory.current)
        forget_blocks(memory)
        watch(memory, rules, at)
    elif memory.current.first[JOBS] >= SHORTEST_PERIOD and is_over(memory, rules):
        turn(memory, rules)


def study(memory: Memory, jobs: Jobs, index: int) -> None:
    """Count a job of the first reference."""
    row, trials, accepts = jobs.rows[index], jobs.trials[index], jobs.accepts[index]
    tested = trials.sum()
    information = tested * weight(tested)
    count(memory.current, row, trials, accepts, jobs.tokens[index], information, features(jobs.at[index]))
    count_first(memory.current, jobs.segments[index], trials[0], accepts[0], accepts[0])


def begin(memory: Memory, rules: Rules, at: float) -> None:
    """Make the studied jobs the reference, and begin to watch."""
    level = memory.current.accepts.sum() / memory.current.trials.sum()
    base = max(level * (1 - level), 0.01)
    if memory.base[0] > 0:  # the variance moves with the level
        memory.spread[:, 1] *= base / memory.base[0]
    memory.base[0] = base
    estimate_variances(memory)
    first, segments = memory.current.first, memory.current.segments
    alpha_1 = first[ACCEPTS] / first[TRIALS]
    segments[:, 2] -= alpha_1 * segments[:, 1]
    first[RESIDUALS] = 0.0
    clear(memory.reference)
    # After a false alarm all that was known is known at once again. After a small change there will be another alarm.
    merge(memory.reference, memory.norm if is_open(memory) and is_like_norm(memory) else memory.current)
    clear(memory.current)
    watch(memory, rules, at)
    if is_open(memory):
        turn_round(memory)


def watch(memory: Memory, rules: Rules, at: float) -> None:
    """Watch from here on, beside the reference as it is."""
    settle(memory)
    find_noise(memory, rules.run_length, rules.margin)
    solve(memory)
    clear_windows(memory, at)
    memory.clock[PHASE] = WATCHING


def learn_anew(memory: Memory) -> None:
    """After an alarm: learn the new level."""
    clear(memory.pending)
    clear(memory.current)
    forget_blocks(memory)
    memory.clock[PHASE] = LEARNING


def compare(memory: Memory, rules: Rules, jobs: Jobs, index: int) -> bool:
    """Count a job beside what the reference expects, and test. Whether that is an alarm."""
    row, trials, accepts = jobs.rows[index], jobs.trials[index], jobs.accepts[index]
    mass = jobs.tokens[index] * memory.shape[row, 0]
    information = mass * weight(mass)
    waves = features(jobs.at[index])
    off = waves - memory.centre
    shift, doubt = wave(memory, off)
    residual = 0.0
    for i in range(POSITIONS):
        residual += accepts[i] - trials[i] * memory.alpha[row, i]
    residual *= weight(mass)
    first = accepts[0] - trials[0] * (memory.alpha[row, 0] + shift)
    count(memory.current, row, trials, accepts, jobs.tokens[index], information, waves)
    count_first(memory.current, jobs.segments[index], trials[0], accepts[0], first)
    limit = WINSOR * math.sqrt(memory.variance[0] * information)
    rest = min(max(residual - information * shift, -limit), limit)
    learn(memory, off, rest + information * shift, information)
    error = math.sqrt(memory.shape[row, 1] + doubt)
    advance(memory, rest, information, information * error, jobs.at[index])
    return weigh(memory, rules.run_length, rules.margin, rest, information, error)


def turn(memory: Memory, rules: Rules) -> None:
    """End a period: the period before it joins the reference."""
    merge(memory.reference, memory.pending)
    clear(memory.pending)
    merge(memory.pending, memory.current)
    clear(memory.current)
    join_blocks(memory)
    settle(memory)
    find_noise(memory, rules.run_length, rules.margin)


def is_over(memory: Memory, rules: Rules) -> bool:
    """Whether the running period is over.

    It is as long as a short reference, which has to keep up with the day, or long enough for the margin.
    """
    num_jobs = memory.current.first[JOBS]
    return bool(num_jobs >= memory.reference.first[JOBS] or is_fine(memory, memory.current, rules.margin))
