"""How much sums over 1, 2, 4 … 4096 consecutive jobs vary: the variance of a stream by time scale.

Neighbouring jobs resemble each other: they come from one producer, one user, one hour. The sum of m such jobs varies
more than m times as much as one job. How much more depends on m, so it is measured for each m = 2ʲ: batch means with
every batch size at once. A test of a window of m jobs takes the variance of its own scale. Batches, clusters, serial
correlation and slow waves are thereby allowed for without naming them.
"""

from __future__ import annotations

from typing import Final

from scheduler.drift.memory import NUM_WINDOWED, RING, SCALES, Memory

BORROWED_BLOCKS: Final = 16.0  # weight, in blocks, of the next shorter scale in the estimate of a scale
GROWTH: Final = 1.05  # factor by which a doubled scale is expected to vary more, before its blocks say
LONGEST_SHARE: Final = 0.25  # of a block, in the information of the reference
MOST_BLOCKS: Final = 500.0  # older blocks fade, so that the variance follows the stream
LIMIT: Final = 4.0  # a squared block sum counts at most this many variances: a change must not hide itself
LIMITED_MEAN: Final = 0.9205  # mean of a squared standard normal number that is limited so


def advance(memory: Memory, residual: float, information: float, error: float, at: float) -> None:
    """Add a job to the running sums, and set the marks and measure the blocks that end with the job."""
    sums = memory.sums
    sums[0] += residual
    sums[1] += information
    sums[2] += error
    memory.clock[NUM_WINDOWED] += 1
    count = memory.clock[NUM_WINDOWED]
    scale = 0
    while scale < SCALES and count % (1 << scale) == 0:
        number = count >> scale
        measure_block(memory, scale, (number - 1) % RING)
        mark = memory.marks[scale, number % RING]
        mark[:3] = sums
        mark[3] = at
        scale += 1


def measure_block(memory: Memory, scale: int, begin: int) -> None:
    """Add the block that ends now and began at the mark `begin` to the period's blocks of its scale.

    A block is left out that is long beside the reference: its sum would show the error of the reference.
    """
    mark = memory.marks[scale, begin]
    total, information = memory.sums[0] - mark[0], memory.sums[1] - mark[1]
    share = information / memory.reference.mass[:, 1].sum()
    if share > LONGEST_SHARE:
        return
    variance = memory.variance[scale]
    squared = min(total * total / (information * (1 + share)), LIMIT * variance) / LIMITED_MEAN
    memory.current_spread[scale, 0] += 1.0
    memory.current_spread[scale, 1] += squared


def join_blocks(memory: Memory) -> None:
    """End a period: the blocks of the period before it join those of the reference."""
    for scale in range(SCALES):
        memory.spread[scale] += memory.pending_spread[scale]
        fading = min(1.0, MOST_BLOCKS / max(memory.spread[scale, 0], 1.0))
        memory.spread[scale] *= fading
    memory.pending_spread[:] = memory.current_spread
    memory.current_spread[:] = 0.0
    estimate_variances(memory)


def forget_blocks(memory: Memory) -> None:
    """Leave out the blocks that are not in the reference yet: they may hold a change."""
    memory.pending_spread[:] = 0.0
    memory.current_spread[:] = 0.0


def estimate_variances(memory: Memory) -> None:
    """Each scale's own blocks, and the next shorter scale while the blocks are few."""
    variance, spread = memory.variance, memory.spread
    borrowed = memory.base[0]
    for scale in range(SCALES):
        num = spread[scale, 0]
        variance[scale] = (BORROWED_BLOCKS * borrowed + spread[scale, 1]) / (BORROWED_BLOCKS + num)
        borrowed = variance[scale] * GROWTH


def clear_windows(memory: Memory, at: float) -> None:
    """Begin to test anew at the time `at`; what is known of the variance stays."""
    memory.clock[NUM_WINDOWED] = 0
    memory.evidence[:] = 0.0
    memory.sums[:] = 0.0
    memory.marks[:] = 0.0
    memory.marks[:, :, 3] = at
