"""How many times faster one way to decode is than another on the same blocks of prompts, with bounds.

*Of all tokens*: tokens over seconds, all blocks together. That is what a device is paid for, and the verdict rests on
it. Blocks are the unit. The variance of the logarithm is linearised (Cochran 1977, §6.4); each block's residual is
divided by one less the block's share (HC3: MacKinnon and White 1985). The degrees of freedom of Student's t are the
effective number of blocks (Kish 1965), less one.

*The median block*: order statistics. Of n independent ratios the number below the true median is binomial(n, 1/2),
whatever their distribution (the sign test; Conover 1999, §3.2). They are exact at every n, where a percentile bootstrap
of a median covers 91 to 94 % instead of 95 with 10 to 20 prompts and several candidates (docs/log.md).

Several candidates share the 5 % that may be wrong (Bonferroni), so that the best of them may be picked afterwards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.switchback.student import t_quantile

LEVEL: Final = 0.95
#: Degrees of freedom below which nothing is known about the spread.
_LEAST_DEGREES: Final = 0.25
#: A logarithm beyond which a bound says nothing: a factor of 10^43.
_MOST: Final = 100.0


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts decoded together in one way, all repeats added up."""

    num_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of the whole block."""
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """A ratio and its bounds; None where there are too few values for any."""

    estimate: float
    low: float | None
    high: float | None
    num_values: int

    @property
    def known(self) -> tuple[float, float] | None:
        """Both bounds, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def total_bounds(
    ours: Sequence[Block], theirs: Sequence[Block], num_comparisons: int = 1, level: float = LEVEL
) -> Bounds:
    """Tokens a second of all blocks together, ours over theirs; block i of both holds the same prompts.

    With probability `level` all of `num_comparisons` such bounds hold. There are none below `min_values` blocks, nor
    where one block holds nearly all of the time.
    """
    sides = [_Total.of(ours), _Total.of(theirs)]
    estimate = sides[0].tokens_per_s / sides[1].tokens_per_s
    n = len(ours)
    share = [(one + other) / 2 for one, other in zip(*(side.shares for side in sides), strict=True)]
    degrees_of_freedom = 1 / sum(part * part for part in share) - 1
    if n < min_values(num_comparisons, level) or degrees_of_freedom < _LEAST_DEGREES:
        return Bounds(estimate, None, None, n)
    moved = [
        (one - other) / (1 - part) for one, other, part in zip(*(side.influences for side in sides), share, strict=True)
    ]
    variance = (n - 1) / n * sum(one * one for one in moved)
    margin = t_quantile(degrees_of_freedom, (1 - level) / num_comparisons) * math.sqrt(variance)
    return Bounds(estimate, estimate * math.exp(-min(margin, _MOST)), estimate * math.exp(min(margin, _MOST)), n)


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


@dataclass(frozen=True, slots=True)
class _Total:
    """All blocks of one way to decode."""

    tokens_per_s: float
    influences: tuple[float, ...]  #: of each block on the logarithm of tokens_per_s
    shares: tuple[float, ...]  #: of the time

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> _Total:
        num_tokens, wall_s = sum(block.num_tokens for block in blocks), sum(block.wall_s for block in blocks)
        shares = tuple(block.wall_s / wall_s for block in blocks)
        influences = tuple(block.num_tokens / num_tokens - part for block, part in zip(blocks, shares, strict=True))
        return cls(num_tokens / wall_s, influences, shares)


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
