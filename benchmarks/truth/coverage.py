"""Counts of intervals that held the truth, and their row in the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """What one run showed; without bounds it showed no verdict yet."""

    low: float | None
    high: float | None
    truth: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """Many runs of one case."""

    what: str  #: the interval
    case: str
    num_jobs: int
    num_runs: int
    num_shown: int  #: of the runs, those with bounds
    num_covered: int  #: of these, those that hold the truth
    num_above: int  #: of these, those that lie above the truth: what is called faster than it is
    median_width: float | None

    @property
    def share(self) -> float | None:
        """Covered, of those shown."""
        return self.num_covered / self.num_shown if self.num_shown else None


def coverage(what: str, case: str, num_jobs: int, runs: Iterable[Shown]) -> Coverage:
    """Add up the runs of a case."""
    found = list(runs)
    bounds = [(one.low, one.high, one.truth) for one in found if one.low is not None and one.high is not None]
    widths = [high - low for low, high, _ in bounds if math.isfinite(high - low)]
    return Coverage(
        what,
        case,
        num_jobs,
        len(found),
        len(bounds),
        sum(low <= truth <= high for low, high, truth in bounds),
        sum(low > truth for low, _, truth in bounds),
        statistics.median(widths) if widths else None,
    )
