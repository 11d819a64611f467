"""With which jobs the product's test raises alarms."""

from __future__ import annotations

from numpy import int64
from numpy.typing import NDArray

from scheduler.drift.memory import NUM_ALARMS, Jobs, Memory
from scheduler.drift.phases import LEAST_TRIALS, follow


def alarms(memory: Memory, run_length: float, jobs: Jobs, found: NDArray[int64], most: int) -> int:
    """Follow the jobs as `scheduler.drift.phases.fold` does.

    The indices of those that raise an alarm go to `found`. Returns how many there are; stops after `most`.
    """
    num = 0
    for index in range(len(jobs.tokens)):
        if jobs.trials[index, 0] >= LEAST_TRIALS:
            before = memory.clock[NUM_ALARMS]
            follow(memory, run_length, jobs, index)
            if memory.clock[NUM_ALARMS] > before:
                found[num] = index
                num += 1
                if num == most:
                    break
    return num
