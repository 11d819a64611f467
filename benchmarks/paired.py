"""Ratios of paired measurements: their median, and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 4000


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


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """`ours[i] / theirs[i]`, measured one right behind the other, so that a machine's drift falls out.

    Bounds: percentile bootstrap of the median over pairs (Efron 1979). Fewer than three pairs bound nothing.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    median = statistics.median(ratios)
    if len(ratios) < 3:
        return Ratio(median, None, None, len(ratios))
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    return Ratio(median, medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1], len(ratios))
