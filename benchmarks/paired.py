"""Ratios of paired measurements: their median, and how sure it is; any figure's bounds; and shares of many values."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

NUM_RESAMPLES: Final = 4000
One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of paired ratios with its 95 % bounds."""

    median: float
    low: float | None  #: None: too few pairs to bound it
    high: float | None
    num_pairs: int

    def __str__(self) -> str:
        bounds = "no bounds" if self.low is None or self.high is None else f"{self.low:.2f}, {self.high:.2f}"
        return f"{self.median:.2f} [{bounds}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """`ours[i] / theirs[i]`, measured one right after the other, so that a machine's drift falls out.

    Fewer than three pairs bound nothing.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    median = statistics.median(ratios)
    low, high = bootstrap(ratios, statistics.median) if len(ratios) >= 3 else (None, None)
    return Ratio(median, low, high, len(ratios))


def bootstrap(measured: Sequence[One], figure: Callable[[Sequence[One]], float]) -> tuple[float, float]:
    """95 % bounds of a figure of independent measurements: percentile bootstrap over them (Efron 1979)."""
    rng = random.Random(0)
    found = sorted(figure(rng.choices(measured, k=len(measured))) for _ in range(NUM_RESAMPLES))
    return found[int(0.025 * NUM_RESAMPLES)], found[int(0.975 * NUM_RESAMPLES) - 1]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]
