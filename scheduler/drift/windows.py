"""The test: the last m jobs against the reference, for m from 5 to 4096 (window-limited GLR, Lai 1995).

    Z_m = Σ residuals / √(V_m · Σ information + (Σ reference error)²)

An alarm is |Z_m| ≥ the threshold of m's level. Long windows find small changes, short ones find large changes quickly.
"""

from __future__ import annotations

from typing import Final

from scheduler.drift.memory import (
    ALARMED,
    CHANGED_AFTER,
    CHANGED_BEFORE,
    DIRECTION,
    LEVELS,
    NUM_ALARMS,
    NUM_WINDOWED,
    PHASE,
    RAISED_AT,
    RING,
    Floats,
    Memory,
)

WINDOWS: Final = 4  # windows a level: each begins one mark after the other
OFTEN: Final = 3  # level j is looked at every 2^(j - 3) jobs: its windows hardly change in between
PLAUSIBLE: Final = 4.0  # a change may lie where Z² is at most so much below its largest value: likelihood ratio e²


def look(memory: Memory, thresholds: Floats, at: float) -> int:
    """Test the windows that end now. After an alarm: its direction, -1 or 1, noted in `memory.alarm`; otherwise 0."""
    count = memory.clock[NUM_WINDOWED]
    for level in range(LEVELS):
        if count % (1 << max(0, level - OFTEN)) or count < (WINDOWS + 1) << level:
            break
        first = nearest(count, level)
        for back in range(first, first + WINDOWS):
            squared = standing(memory, level, back)
            if abs(squared) >= thresholds[level] ** 2:
                return note(memory, at)
    return 0


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


def note(memory: Memory, at: float) -> int:
    """Note the alarm, and between which moments the change was: where windows begin that are nearly the clearest."""
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
    memory.alarm[DIRECTION] = direction
    memory.alarm[RAISED_AT] = at
    memory.alarm[CHANGED_AFTER] = earliest
    memory.alarm[CHANGED_BEFORE] = latest
    memory.clock[NUM_ALARMS] += 1
    memory.clock[PHASE] = ALARMED
    return direction


def is_kept(memory: Memory, level: int, back: int) -> bool:
    """Whether a window of the level that begins `back` marks ago exists and is one of those that are tested."""
    count = memory.clock[NUM_WINDOWED]
    first = nearest(count, level)
    return first <= back < first + WINDOWS and count >> level >= back
