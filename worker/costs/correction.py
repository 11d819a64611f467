"""What real rounds say about calibrated costs: a device's speed now, and how each shape differs from it.

The logarithm of (time taken / time calibrated) of a round has two parts: the level of what was timed, the target or one
drafter, and a deviation of its shape. Shapes that are seldom decoded follow the level, so that a device that slows down
does not make them look cheap. A shape that was calibrated in a bad moment is corrected by its deviation.

Level and deviations are exponentially weighted medians that begin as if every round so far had agreed with what was
known. So

- a disturbance of fewer rounds than the half-life moves neither beyond what undisturbed rounds show, however long
  those rounds took: its weight is below one half;
- a lasting change is followed in full as soon as it has lasted for one half-life of rounds.

A mean has neither property: one round of ten seconds moves it, unless values are clipped so tightly that learning takes
hundreds of rounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

from alphaloop.cost_doubt import LogEstimate
from alphaloop.cost_state import Deviation
from worker.costs.median import ExponentialMedian

Shape = TypeVar("Shape", bound=Hashable)

_NONE: Final = Deviation(0.0, 0.0, 0)


class Correction(Generic[Shape]):
    """The corrections of one part of a round, the target's pass or one drafter's proposal, updated by rounds.

    `known` is the correction of each shape from before. A round's deviation is taken from the level as it stands one
    half-life of rounds later, because only then does the level show whether the device had changed.
    """

    def __init__(self, half_life: int, known: Mapping[Shape, LogEstimate]) -> None:
        self._half_life = half_life
        means = sorted(estimate.mean for estimate in known.values())
        first = means[len(means) // 2] if means else 0.0
        # The level's variance is at most that of the most certain shape.
        variance = min((estimate.variance for estimate in known.values()), default=0.0)
        self._level = ExponentialMedian(half_life, first, variance)
        self._deviations = {
            shape: ExponentialMedian(half_life, estimate.mean - first, estimate.variance - variance)
            for shape, estimate in known.items()
        }
        self._pending: deque[tuple[Shape, float]] = deque()

    def observe(self, shape: Shape, ratio: float) -> None:
        """A round nearest to `shape` took `ratio` times what was calibrated for it."""
        log = math.log(ratio)
        self._level.add(log - self._deviation(shape))
        self._pending.append((shape, log))
        if len(self._pending) > self._half_life:
            settled, past = self._pending.popleft()
            if settled not in self._deviations:
                self._deviations[settled] = ExponentialMedian(self._half_life, 0.0)
            self._deviations[settled].add(past - self._level.value)

    def resume(self, level: LogEstimate, share: float) -> None:
        """Rounds come again after a pause that left this share of the level; deviations stay.

        `share` in (0, 1] says how much of its usual weight the level keeps against the rounds to come.
        """
        self._level = ExponentialMedian(self._half_life, level.mean, level.variance, share)
        self._pending.clear()

    @property
    def level(self) -> LogEstimate:
        """How much slower than calibrated this is, over all shapes."""
        return LogEstimate(self._level.value, self._level.variance)

    @property
    def log_level(self) -> float:
        """The same without its variance, which takes longer to work out."""
        return self._level.value

    @property
    def has_settled(self) -> bool:
        """Whether the level follows its own rounds rather than the value from before them."""
        return self._level.first_share < 0.5

    def deviation(self, shape: Shape) -> Deviation:
        """How much slower than the level this shape is."""
        median = self._deviations.get(shape)
        return _NONE if median is None else Deviation(median.value, median.variance, median.num_values)

    def _deviation(self, shape: Shape) -> float:
        return self._deviations[shape].value if shape in self._deviations else 0.0
