"""When a change began: windows of the last m jobs beside the reference, for m from 5 to 4096.

    Z_m = Σ residuals / √(V_m · Σ information + (Σ reference error)²)

Where |Z_m| is nearly the largest, the window probably begins with the change.
"""

from __future__ import annotations

from typing import Final

from scheduler.drift.memory import (
    CHANGED_AFTER,
    CHANGED_BEFORE,
    DIRECTION,
    LEVELS,
    MOVED_AFTER,
    MOVED_BEFORE,
    NUM_ALARMS,
    NUM_WINDOWED,
    RAISED_AT,
    RING,
    Memory,
    is_open,
)

WINDOWS: Final = 4  # windows a level: each begins one mark after the other
PLAUSIBLE: Final = 4.0  # a change may lie where Z² is at most so much below its largest value: likelihood ratio e²


def nearest(count: int, level: int) -> int:
    """How many marks ago the shortest window of a level begins: the level's windows are 4·2ʲ to 8·2ʲ jobs long."""
    return WINDOWS if count % (1 << level) else WINDOWS + 1


def standing(memory: Memory, level: int, back: int) -> float:
    """Z² of the window that began `back` marks of `level` ago, with the sign of Z."""
    mark = memory.marks[level, ((memory.clock[NUM_WINDOWED] >> level) - back) % RING]
    total = memory.sums[0] - mark[0]
    error = memory.sums[2] - mark[2]
    # A block of 8·2ʲ jobs, so the scale j + 3, is the shortest that is as long as every window of level j.
    expected = memory.variance[level + 3] * (memory.sums[1] - mark[1]) + error * error
    return total * abs(total) / expected if expected > 0 else 0.0


def note(memory: Memory, at: float) -> None:
    """Note an alarm, and between which moments the change was: where windows begin that are nearly the clearest."""
    best = 0.0
    for level in range(LEVELS):
        for back in range(RING):
            squared = standing(memory, level, back) if is_kept(memory, level, back) else 0.0
            if abs(squared) > abs(best):
                best = squared
    direction = 1 if best > 0 else -1
    earliest, latest = at, 0.0
    for level in range(LEVELS):
        for back in range(RING):
            if is_kept(memory, level, back) and direction * standing(memory, level, back) >= abs(best) - PLAUSIBLE:
                began = memory.marks[level, ((memory.clock[NUM_WINDOWED] >> level) - back) % RING, 3]
                earliest, latest = min(earliest, began), max(latest, began)
    memory.clock[NUM_ALARMS] += 1
    memory.alarm[RAISED_AT] = at
    memory.alarm[MOVED_AFTER] = earliest
    memory.alarm[MOVED_BEFORE] = latest
    if not is_open(memory):
        begin_event(memory, direction)


def begin_event(memory: Memory, direction: int) -> None:
    """Let the event begin with the last change."""
    memory.alarm[DIRECTION] = direction
    memory.alarm[CHANGED_AFTER] = memory.alarm[MOVED_AFTER]
    memory.alarm[CHANGED_BEFORE] = memory.alarm[MOVED_BEFORE]


def is_kept(memory: Memory, level: int, back: int) -> bool:
    """Whether a window of the level that begins `back` marks ago exists and is one of those that are tested."""
    count = memory.clock[NUM_WINDOWED]
    first = nearest(count, level)
    return first <= back < first + WINDOWS and count >> level >= back
