"""The reference: the level of each draft length and position, and what is expected of a job.

α_i hardly moves with k, but it does move: look-up on 700 real texts had α_1 of .465 at k = 1 and .419 at k = 12. Each
draft length therefore has a level of its own, drawn towards the level over all lengths while its own jobs are few. What
remains uncertain widens the test of the jobs that it concerns.
"""

from __future__ import annotations

from typing import Final

from scheduler.drift.memory import (
    ACCEPTS,
    FEATURES,
    JOBS,
    POSITIONS,
    RESIDUALS,
    ROWS,
    SCALES,
    SQUARES,
    TRIALS,
    Floats,
    Memory,
    Tally,
)

#: Weight of a job: trials / (1 + WITHIN · trials), the best where trials of a job correlate by .1. Where they correlate
#: otherwise the test loses a little power; its rate stays, because the variance is measured.
WITHIN: Final = 0.1
LENGTH_DEVIATION: Final = 0.04  # prior standard deviation of a draft length's level around that of all


def weight(trials: float) -> float:
    """The factor of a residual."""
    return 1 / (1 + WITHIN * trials)


def count(
    tally: Tally, row: int, trials: Floats, accepts: Floats, tokens: float, information: float, waves: Floats
) -> None:
    """Add a job's counts."""
    tally.trials[row, :] += trials
    tally.accepts[row, :] += accepts
    tally.mass[row, 0] += tokens
    tally.mass[row, 1] += information
    for i in range(FEATURES):
        tally.features[i] += information * waves[i]


def count_first(tally: Tally, segment: int, trials: float, accepts: float, residual: float) -> None:
    """Add a job's position 1."""
    first = tally.first
    first[JOBS] += 1
    first[TRIALS] += trials
    first[ACCEPTS] += accepts
    first[RESIDUALS] += residual
    first[SQUARES] += residual * residual
    its = tally.segments[segment]
    its[0] += 1
    its[1] += trials
    its[2] += residual


def merge(into: Tally, added: Tally) -> None:
    """Add `added` to `into`."""
    into.trials[:] += added.trials
    into.accepts[:] += added.accepts
    into.mass[:] += added.mass
    into.features[:] += added.features
    into.first[:] += added.first
    into.segments[:] += added.segments


def clear(tally: Tally) -> None:
    """Forget."""
    tally.trials[:] = 0.0
    tally.accepts[:] = 0.0
    tally.mass[:] = 0.0
    tally.features[:] = 0.0
    tally.first[:] = 0.0
    tally.segments[:] = 0.0


def settle(memory: Memory) -> None:
    """Compute from the counts of the reference what is expected of jobs."""
    reference, variance = memory.reference, memory.variance[SCALES - 1]
    tokens, information = reference.mass[:, 0].sum(), reference.mass[:, 1].sum()
    known = 0.0
    for i in range(POSITIONS):
        trials, accepts = reference.trials[:, i].sum(), reference.accepts[:, i].sum()
        # A position that the reference never tested is taken to be like the one before it.
        known = accepts / trials if trials > 0 else known
        for row in range(ROWS):
            own = reference.trials[row, i]
            trust = shrinkage(reference.mass[row, 1], variance) if own > 0 else 0.0
            level = reference.accepts[row, i] / own if own > 0 else 0.0
            memory.alpha[row, i] = trust * level + (1 - trust) * known
    for row in range(ROWS):
        trust = shrinkage(reference.mass[row, 1], variance)
        per_token = reference.trials[row].sum() / reference.mass[row, 0] if reference.mass[row, 0] > 0 else 0.0
        memory.shape[row, 0] = trust * per_token + (1 - trust) * reference.trials.sum() / tokens
        overall = variance / information
        its = trust**2 * variance / reference.mass[row, 1] if reference.mass[row, 1] > 0 else 0.0
        memory.shape[row, 1] = max(overall, its + (1 - trust) ** 2 * (LENGTH_DEVIATION**2 + overall))
    memory.centre[:] = reference.features / information


def shrinkage(information: float, variance: float) -> float:
    """Weight of a draft length's own counts beside those of all lengths."""
    return information / (information + variance / LENGTH_DEVIATION**2)
