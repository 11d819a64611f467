"""Costs as they are at one moment: what was measured, and what real rounds made of it. A cost table follows from it.

A correction has two parts, the level of what was timed and the deviation of a shape (worker/costs/correction.py). The
levels move with every round and fade with time. A round moves the deviation of one shape at most, so the states of two
moments hardly differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from alphaloop.cost import CostPoint, CostTable
from alphaloop.cost_doubt import LogEstimate


@dataclass(frozen=True, slots=True)
class CostBasis:
    """What does not change while a worker lives; costs of servers have another one when a route is first known.

    Compared by identity.
    """

    points: tuple[CostPoint, ...]  #: of what is timed itself, with `num_corrections` from before
    timed: Mapping[str, str]  #: drafters that have the times of another one, see `with_shared_weights`

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Deviation(NamedTuple):
    """Of one point's shape from the level of what was timed. A tuple, because states are compared often."""

    mean: float  #: of the logarithm
    variance: float
    num_rounds: int  #: real rounds behind it


@dataclass(frozen=True, slots=True)
class CostState:
    """The corrections at one moment."""

    basis: CostBasis
    levels: Mapping[str | None, LogEstimate]  #: of the target (None) and of drafters
    deviations: tuple[Deviation, ...]  #: by point of the basis

    def points(self) -> tuple[CostPoint, ...]:
        """The measured points, corrected."""
        pairs = zip(self.basis.points, self.deviations, strict=True)
        return tuple(self._corrected(point, its) for point, its in pairs)

    def table(self) -> CostTable:
        """The costs that decisions use."""
        return CostTable(with_shared_weights(self.points(), self.basis.timed))

    def _corrected(self, point: CostPoint, its: Deviation) -> CostPoint:
        level = self.levels[point.drafter]
        estimate = LogEstimate(level.mean + its.mean, level.variance + its.variance)
        # Not by `replace`, which takes twice as long: a decision corrects every point.
        return CostPoint(
            point.drafter,
            point.batch,
            point.width,
            point.median_ms,
            point.num_samples,
            point.context,
            point.kind,
            estimate.factor,
            point.num_corrections + its.num_rounds,
            estimate.variance,
        )


def with_shared_weights(points: Iterable[CostPoint], timed: Mapping[str, str]) -> tuple[CostPoint, ...]:
    """What was measured, and the same under the name of every drafter in `timed`, which has the other one's times."""
    measured = [point for point in points if point.drafter not in timed]
    theirs = (
        replace(point, drafter=name) for name, other in timed.items() for point in measured if point.drafter == other
    )
    return (*measured, *theirs)
