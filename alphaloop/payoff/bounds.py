"""Medians of paired ratios, with bounds that hold for all of them at once.

The bounds are order statistics: of n independent ratios the number below the true median is binomial(n, 1/2), whatever
their distribution (the sign test; Conover 1999, §3.2). They are exact at every n, where a percentile bootstrap of a
median covers 91 to 94 % instead of 95 with 10 to 20 prompts and several candidates (docs/log.md). Several candidates
share the 5 % that may be wrong (Bonferroni), so that the best of them may be picked afterwards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class Bounds:
    """A median and its bounds; None where there are too few values for any."""

    median: float
    low: float | None
    high: float | None
    num_values: int

    @property
    def known(self) -> tuple[float, float] | None:
        """Both bounds, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def median_bounds(values: Sequence[float], num_comparisons: int = 1, level: float = LEVEL) -> Bounds:
    """The median of independent `values`; with probability `level` all of `num_comparisons` such bounds hold."""
    ordered = sorted(values)
    n = len(ordered)
    allowed = (1 - level) / 2 / num_comparisons
    # The (j+1)-th smallest is above the true median with the probability that at most j of n lie below it.
    j, below = -1, 0.5**n
    while below <= allowed:
        j += 1
        below += math.comb(n, j + 1) * 0.5**n
    median = statistics.median(ordered)
    return Bounds(median, None, None, n) if j < 0 else Bounds(median, ordered[j], ordered[n - 1 - j], n)


def min_values(num_comparisons: int, level: float = LEVEL) -> int:
    """How many values it takes to bound so many medians at once."""
    return math.ceil(math.log2(2 * num_comparisons / (1 - level)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie, interpolated (Hyndman & Fan 1996, type 7)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
