"""An open event: its jobs beside the norm, which is the level before it, and its end by equivalence."""

from __future__ import annotations

import math
from typing import Final

from scheduler.drift.memory import DIRECTION, JOBS, RESIDUALS, TRIALS, Floats, Memory, is_open
from scheduler.drift.precision import CLOSING, is_fine, reference_error, standard_error
from scheduler.drift.reference import clear, count, count_first, merge, weight
from scheduler.drift.rhythm import wave
from scheduler.drift.windows import begin_event, note

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


def recall(
    memory: Memory, row: int, trials: Floats, accepts: Floats, tokens: float, waves: Floats, segment: int
) -> None:
    """Count a job beside the norm."""
    shift, _ = wave(memory, waves - memory.norm_centre)
    tested = trials.sum()
    count(memory.latest, row, trials, accepts, tokens, tested * weight(tested), waves)
    residual = accepts[0] - trials[0] * (memory.norm_alpha[row] + shift)
    count_first(memory.latest, segment, trials[0], accepts[0], residual)


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


def judge(memory: Memory, margin: float) -> bool:
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
    if change + CLOSING * error <= max(margin, CLOSING * reference_error(memory, memory.norm, latest)):
        memory.alarm[DIRECTION] = 0.0
    elif change - CLOSING * error > margin or is_fine(memory, latest, margin):
        merge(memory.earlier, latest)
        clear(latest)
    return bool(returns)
