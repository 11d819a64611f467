"""The test: evidence for a fall and for a rise, of several sizes at once (Shiryaev-Roberts, a mixture over sizes).

For a size Δ, R is the sum, over every job with which the change may have begun, of the likelihood ratio of the jobs
since (Shiryaev 1963, Roberts 1966; x: residual, s: information, V: variance on the scale of the size):

    R ← (1 + R) · exp((±Δ x - Δ² s / 2) / V)

While nothing changes each R grows by at most 1 a job on average, and so does their weighted mean. An alarm at a mean of
A therefore comes after A jobs or later on average: the wanted run length is the threshold.
"""

from __future__ import annotations

import math
from typing import Final

from scheduler.drift.memory import JOBS, SCALES, SIZES, Memory

STEEPEST: Final = 1.5  # standard deviations of a job: residuals are skewed, and a steeper test would follow single jobs


def weigh(memory: Memory, run_length: float, margin: float, residual: float, information: float, error: float) -> bool:
    """Add a job to the evidence. Whether that is an alarm.

    Args:
        memory: changed.
        run_length: jobs between two false alarms.
        margin: the smallest size, in α.
        residual: of the job, times its weight.
        information: of the job.
        error: standard error of the α that is expected of the job.
    """
    mean = 0.0
    deviation = math.sqrt(memory.variance[0] * information)
    for step in range(SIZES):
        size = margin * 2.0**step
        # The error of the reference is the same in all jobs since the change: it counts most where a size takes long.
        doubt = 2 * math.log(run_length) * (error / size) ** 2
        if doubt < 1:  # otherwise this reference cannot show the size
            variance = memory.noise[step] / (1 - doubt)
            size = min(size, STEEPEST * variance / deviation)
            for side in range(2):
                towards = residual if side else -residual
                memory.evidence[side, step] += 1
                memory.evidence[side, step] *= math.exp((size * towards - size * size * information / 2) / variance)
        mean += share(step) * (memory.evidence[0, step] + memory.evidence[1, step])
    return bool(mean >= run_length)


def share(step: int) -> float:
    """Weight of a size in each direction. Half the size takes four times as long, so it has twice the weight."""
    return 0.5 * 2.0 ** (SIZES - 1 - step) / (2**SIZES - 1)


def find_noise(memory: Memory, run_length: float, margin: float) -> None:
    """Take for each size the variance with which no stretch of jobs raises more false alarms than wanted.

    Sums over m jobs with information S have the variance S · V_m. They reach an alarm, the log likelihood ratio
    L = ln(run length) for a size Δ at the variance V, where they exceed L V / Δ + Δ S / 2. That is to be √(2 L)
    standard deviations for every m. Independent jobs give V = V_1; clusters count for large sizes too, which are found
    in less time than a cluster takes.
    """
    information = memory.reference.mass[:, 1].sum() / memory.reference.first[JOBS]
    limit = math.log(run_length)
    for step in range(SIZES):
        size = margin * 2.0**step
        least = 0.0
        for scale in range(SCALES):
            stretch = information * 2.0**scale
            deviation = math.sqrt(stretch * memory.variance[scale])
            least = max(least, size / limit * (math.sqrt(2 * limit) * deviation - size * stretch / 2))
        memory.noise[step] = max(least, memory.variance[0] / 2)
