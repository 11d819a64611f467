"""The variance of a corrected cost, and how the correction fades while no round measures it. Pure.

The logarithm of a drafter's correction is modelled as an Ornstein–Uhlenbeck process around that of the target's
correction (Uhlenbeck and Ornstein 1930), because other load on a host slows a drafter down only for a while.
With m the last estimate of variance v, t the target's level and κ = 2^-h after h half-lives, the estimate becomes

    mean      t + κ · (m - t)
    variance  κ² · v + (1 - κ²) · PRIOR_SD²

Fading in two steps is fading in one: faded(h1) and then faded(h2) is faded(h1 + h2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.cost import CostPoint

#: Work that slows a host down (a build, a backup, another tenant's load) ends after seconds to minutes.
HALF_LIFE_S: Final = 300.0
#: A return to a drafter that is still slow is noticed within 32 rounds. Once in so many rounds of the target it costs
#: at most 32 / 8,192 = 0.4 % of the time, a fifth of the usual share for exploration.
HALF_LIFE_ROUNDS: Final = 8192
#: Standard deviation of ln(a drafter's slowness over the target's), with nothing known: 95 % within a factor of 2.2.
PRIOR_SD: Final = 0.4
#: Seconds in which a stored estimate does not age: a fiftieth of a half-life.
SHORTEST_PAUSE_S: Final = HALF_LIFE_S / 50
#: Standard deviation of ln(one timing) on a quiet host.
TIMING_SD: Final = 0.1


@dataclass(frozen=True, slots=True)
class LogEstimate:
    """The logarithm of a correction: its expected value and the variance of that value."""

    mean: float
    variance: float

    @property
    def factor(self) -> float:
        """The correction itself."""
        return math.exp(self.mean)


def num_half_lives(seconds: float, num_rounds: float = 0.0) -> float:
    """Half-lives that pass in so many seconds and rounds of the target; both age an estimate."""
    return max(0.0, seconds) / HALF_LIFE_S + num_rounds / HALF_LIFE_ROUNDS


def faded(estimate: LogEstimate, towards: float, half_lives: float) -> LogEstimate:
    """The estimate after so many half-lives without a measurement; `towards` is ln(the target's correction)."""
    kept = 2.0**-half_lives
    mean = towards + kept * (estimate.mean - towards)
    return LogEstimate(mean, kept**2 * estimate.variance + (1 - kept**2) * PRIOR_SD**2)


def timing_variance(num_samples: int) -> float:
    """Variance of ln(median of so many timings): π/2 · σ² / n, the asymptotic one of a normal sample's median."""
    return math.pi / 2 * TIMING_SD**2 / num_samples


def after_pause(points: Iterable[CostPoint], seconds: Mapping[str, float]) -> tuple[CostPoint, ...]:
    """Stored points as they stand after a pause in which nothing was measured; `seconds` are by drafter.

    A drafter's level fades towards the target's; the differences between its shapes stay. The target's points stay too,
    because all alternatives share its level and its first rounds measure it again.
    """
    points = tuple(points)
    towards = level_of(point for point in points if point.drafter is None)
    moved: dict[str, tuple[float, float]] = {}
    for drafter, pause_s in seconds.items():
        if pause_s < SHORTEST_PAUSE_S:
            continue
        own = level_of(point for point in points if point.drafter == drafter)
        half_lives = num_half_lives(pause_s)
        moved[drafter] = faded(LogEstimate(own, 0.0), towards, half_lives).mean - own, half_lives
    return tuple(point if point.drafter not in moved else _moved(point, *moved[point.drafter]) for point in points)


def level_of(points: Iterable[CostPoint]) -> float:
    """ln(correction) over all shapes, as one median; 0 without any."""
    logs = sorted(math.log(point.correction) for point in points)
    return logs[len(logs) // 2] if logs else 0.0


def _moved(point: CostPoint, by: float, half_lives: float) -> CostPoint:
    variance = faded(LogEstimate(0.0, point.correction_variance), 0.0, half_lives).variance
    return replace(point, correction=point.correction * math.exp(by), correction_variance=variance)
