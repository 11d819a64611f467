"""The streams of the contest: steady ones, and ones with a fall, each of every kind in turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from benchmarks.drift.world import Condition, Nature, Shift, decoded, draw, nature
from scheduler.drift.phases import Jobs

ALPHAS: Final = (0.7, 0.45)
DRAFT_LENGTHS: Final = (1, 3, 5, 12)
KINDS: Final = tuple(product(ALPHAS, DRAFT_LENGTHS))
WARM_UP_JOBS: Final = 6_000  # three days
LONGEST_DELAY: Final = 4_000  # jobs; a change that is not found counts as found then
GRADUAL_JOBS: Final = 500
SIZES: Final = (0.05, 0.10, 0.20)
BETWEEN_SIZES: Final = (0.07, 0.14)
#: Over how many jobs, and size. The last ones lie between the sizes that the product's test is built on.
CHANGES: Final = (*product((0, GRADUAL_JOBS), SIZES), *((0, size) for size in BETWEEN_SIZES))
NULL_SEED, SHIFT_SEED = 20_261_123, 20_261_124


def kind_of(number: int) -> tuple[float, int]:
    """α_1 and draft length of a stream."""
    return KINDS[number % len(KINDS)]


def null_streams(condition: Condition, num_streams: int, num_jobs: int) -> Iterator[Jobs]:
    """Steady streams."""
    for number in range(num_streams):
        yield draw(condition, *kind_of(number), num_jobs, np.random.default_rng((NULL_SEED, number)))


class Fork(NamedTuple):
    """A stream up to the beginning of a fall, at any hour of the fourth day, and one way on for each change."""

    before: Jobs
    later: list[Jobs]


def changing_streams(condition: Condition, num_streams: int) -> Iterator[Fork]:
    """Streams with every change."""
    for number in range(num_streams):
        rng = np.random.default_rng((SHIFT_SEED, number))
        alpha, k = kind_of(number)
        after = WARM_UP_JOBS + int(rng.integers(2_000))
        its = nature(condition, alpha, after + LONGEST_DELAY, rng)
        before, later = (Nature._make(part[side] for part in its) for side in (slice(after), slice(after, None)))
        yield Fork(
            decoded(before, np.zeros(after), k, rng),
            [decoded(later, Shift(size, 0, over).at(LONGEST_DELAY), k, rng) for over, size in CHANGES],
        )
