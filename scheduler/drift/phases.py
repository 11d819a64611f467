"""The life of a stream's test, a job at a time: learning, then watching, with or without an open event.

* Learning: the first jobs are the reference.
* Watching: each job is compared with the reference, which is lagged. A stretch of jobs (a period) joins it when the
  next period is over without an alarm, so a change is not absorbed before it can be seen.
* An alarm opens an event. What was the reference is the norm now; the stream is learned anew, and tested meanwhile
  beside what little is known of its new level, so that a further change raises an alarm of its own. It belongs to the
  same event.

The jobs of an open event are compared with the norm, which is the level before it. The event ends by equivalence.
"""

from __future__ import annotations

import math
from typing import Final

from scheduler.drift.memory import (
    ACCEPTS,
    ALPHA_MARGIN,
    CLOSING,
    DIRECTION,
    JOBS,
    LEARNING,
    NUM_JOBS,
    PHASE,
    RESIDUALS,
    SCALES,
    TRIALS,
    WATCHING,
    Jobs,
    JobTally,
    Memory,
    advance,
    begin_event,
    clear,
    clear_windows,
    count,
    estimate_variances,
    features,
    find_noise,
    forget_blocks,
    is_fine,
    is_open,
    join_blocks,
    learn,
    merge,
    note,
    reference_error,
    settle,
    solve,
    standard_error,
    wave,
    weigh,
    weight,
)

REFERENCE_JOBS: Final = 64  # first jobs of a stream, with which later ones are compared
WINSOR: Final = 3.5  # residuals of short jobs are skewed; one job alone must not raise an alarm
BETWEEN_LOOKS: Final = 32  # jobs between two fits of the rhythm, and two looks at a period
SHORTEST_PERIOD: Final = 64  # jobs
LEAST_TRIALS: Final = 1.0


def fold(memory: Memory, run_length: float, jobs: Jobs) -> None:
    """Add jobs to the memory, one after the other. Jobs without a trial say nothing and are passed over.

    Args:
        memory: changed.
        run_length: jobs between two false alarms.
        jobs: in the order in which they were decoded.
    """
    for index in range(len(jobs.tokens)):
        if jobs.trials[index, 0] >= LEAST_TRIALS:
            follow(memory, run_length, jobs, index)


def follow(memory: Memory, run_length: float, jobs: Jobs, index: int) -> None:
    """Add one job."""
    memory.clock[NUM_JOBS] += 1
    if is_open(memory):
        shift, _ = wave(memory, features(jobs.at[index]) - memory.norm_centre)
        study(memory.latest, jobs, index, memory.norm_alpha[jobs.rows[index]] + shift)
    is_learning = memory.clock[PHASE] == LEARNING
    if is_learning:
        study(memory.current, jobs, index, 0.0)
    if has_moved_on(memory, run_length, jobs, index) if is_learning else compare(memory, run_length, jobs, index):
        raise_alarm(memory, jobs.at[index])
        learn_anew(memory)
    elif is_learning:
        if memory.current.first[JOBS] >= REFERENCE_JOBS:
            begin(memory, run_length, jobs.at[index])
    elif memory.current.first[JOBS] % BETWEEN_LOOKS == 0:
        look_back(memory, run_length, jobs.at[index])


def look_back(memory: Memory, run_length: float, at: float) -> None:
    """Look at the running period as a whole."""
    solve(memory)
    if is_open(memory) and judge(memory):
        clear(memory.pending)
        clear(memory.current)
        forget_blocks(memory)
        watch(memory, run_length, at)
    elif memory.current.first[JOBS] >= SHORTEST_PERIOD and is_over(memory):
        turn(memory, run_length)


def study(tally: JobTally, jobs: Jobs, index: int, expected: float) -> None:
    """Count a job beside the α_1 that is expected of it: 0 in the first reference, in an event that of the norm."""
    tested = jobs.trials[index].sum()
    residual = jobs.accepts[index, 0] - jobs.trials[index, 0] * expected
    count(tally, jobs, index, tested * weight(tested), features(jobs.at[index]), residual)


def begin(memory: Memory, run_length: float, at: float) -> None:
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
    watch(memory, run_length, at)
    if is_open(memory):
        turn_round(memory)


def watch(memory: Memory, run_length: float, at: float) -> None:
    """Watch from here on, beside the reference as it is."""
    settle(memory)
    find_noise(memory, run_length)
    solve(memory)
    clear_windows(memory, at)
    memory.clock[PHASE] = WATCHING


def learn_anew(memory: Memory) -> None:
    """After an alarm: learn the new level."""
    clear(memory.pending)
    clear(memory.current)
    forget_blocks(memory)
    memory.evidence[:] = 0.0
    memory.clock[PHASE] = LEARNING


def compare(memory: Memory, run_length: float, jobs: Jobs, index: int) -> bool:
    """Count a job beside what the reference expects, and test. Whether that is an alarm."""
    residual, information, shift, doubt = beside_reference(memory, jobs, index)
    row, waves = jobs.rows[index], features(jobs.at[index])
    off = waves - memory.centre
    first = jobs.accepts[index, 0] - jobs.trials[index, 0] * (memory.alpha[row, 0] + shift)
    count(memory.current, jobs, index, information, waves, first)
    rest = winsorized(memory, residual - information * shift, information)
    learn(memory, off, rest + information * shift, information)
    error = math.sqrt(memory.shape[row, 1] + doubt)
    advance(memory, rest, information, information * error, jobs.at[index])
    return weigh(memory, run_length, rest, information, error)


def beside_reference(memory: Memory, jobs: Jobs, index: int) -> tuple[float, float, float, float]:
    """A job's weighted residual beside the reference and its information; the day's shift of α there, its variance."""
    row = jobs.rows[index]
    mass = jobs.tokens[index] * memory.shape[row, 0]
    shift, doubt = wave(memory, features(jobs.at[index]) - memory.centre)
    residual = (jobs.accepts[index] - jobs.trials[index] * memory.alpha[row]).sum() * weight(mass)
    return residual, mass * weight(mass), shift, doubt


def winsorized(memory: Memory, residual: float, information: float) -> float:
    """The residual within WINSOR standard deviations of a job."""
    limit = WINSOR * math.sqrt(memory.variance[0] * information)
    return float(min(max(residual, -limit), limit))


def has_moved_on(memory: Memory, run_length: float, jobs: Jobs, index: int) -> bool:
    """Test a job while the level after an alarm is learned. Whether it moved further the same way, which is an alarm.

    Expected is the reference, moved by what the jobs since the change have shown: those of the alarm's window, and each
    job once it was tested. The window raised the alarm, so it exaggerates its change: the way back is not tested, and
    jobs of the new level may vary more, but are never taken to vary less. Before the first reference nothing is
    expected.
    """
    if not is_open(memory):
        return False
    residual, information, shift, _ = beside_reference(memory, jobs, index)
    residual -= information * shift
    sums, is_alarm = memory.sums, False
    if sums[1] > 0:
        moved = sums[0] / sums[1]
        level = memory.reference.accepts.sum() / memory.reference.trials.sum() + moved
        spread = max(level * (1 - level) / memory.base[0], 1.0)
        rest = winsorized(memory, residual - information * moved, information)
        error = math.sqrt(memory.variance[SCALES - 1] * spread / sums[1])
        memory.evidence[1 if memory.marks[0, 0, 0] < 0 else 0] = 0.0
        is_alarm = weigh(memory, run_length, rest / spread, information / spread, error)
    sums[0] += residual
    sums[1] += information
    return is_alarm


def turn(memory: Memory, run_length: float) -> None:
    """End a period: the period before it joins the reference."""
    merge(memory.reference, memory.pending)
    clear(memory.pending)
    merge(memory.pending, memory.current)
    clear(memory.current)
    join_blocks(memory)
    settle(memory)
    find_noise(memory, run_length)


def is_over(memory: Memory) -> bool:
    """Whether the running period is over.

    It is as long as a short reference, which has to keep up with the day, or long enough for the margin.
    """
    num_jobs = memory.current.first[JOBS]
    return bool(num_jobs >= memory.reference.first[JOBS] or is_fine(memory, memory.current))


FEWEST_JUDGED: Final = 64  # jobs
REALLY: Final = 2.0  # standard errors of another level


def raise_alarm(memory: Memory, at: float) -> None:
    """Open an event, or note a further change in the open one: what it does is estimated on later jobs."""
    if not is_open(memory):
        clear(memory.norm)
        merge(memory.norm, memory.reference)
        memory.norm_alpha[:] = memory.alpha[:, 0]
        memory.norm_centre[:] = memory.centre
    clear(memory.earlier)
    clear(memory.latest)
    note(memory, at)


def is_like_norm(memory: Memory) -> bool:
    """Whether the latest jobs of the event do not really differ from the norm."""
    latest = memory.latest
    change = abs(latest.first[RESIDUALS] / latest.first[TRIALS])
    error, doubt = standard_error(memory, latest), reference_error(memory, memory.norm, latest)
    return bool(change <= REALLY * math.sqrt(error**2 + doubt**2))


def turn_round(memory: Memory) -> None:
    """Let a fall become a rise, or a rise a fall, where the last change led to the other side of the norm."""
    change = memory.latest.first[RESIDUALS] / memory.latest.first[TRIALS]
    if change * memory.alarm[DIRECTION] < -REALLY * standard_error(memory, memory.latest):
        begin_event(memory, -memory.alarm[DIRECTION])


def judge(memory: Memory) -> bool:
    """End the event if its latest jobs show the level of the norm; begin a new period if they show another.

    Whether the norm is the reference again: where it is longer than what was learned since, and not really different.
    """
    latest = memory.latest
    if latest.first[JOBS] < FEWEST_JUDGED:
        return False
    returns = memory.norm.first[JOBS] > memory.reference.first[JOBS] and is_like_norm(memory)
    if returns:
        clear(memory.reference)
        merge(memory.reference, memory.norm)
    change, error = abs(latest.first[RESIDUALS] / latest.first[TRIALS]), standard_error(memory, latest)
    if change + CLOSING * error <= max(ALPHA_MARGIN, CLOSING * reference_error(memory, memory.norm, latest)):
        memory.alarm[DIRECTION] = 0.0
    elif change - CLOSING * error > ALPHA_MARGIN or is_fine(memory, latest):
        merge(memory.earlier, latest)
        clear(latest)
    return bool(returns)
