"""What real rounds say about calibrated costs: a device's speed now, and each shape's own part in it.

The logarithm of (time taken / time calibrated) of a round is taken apart into the level of what was timed, the target
or one drafter, and a deviation of its shape. Shapes that are seldom decoded follow the level, so a device that slows
down does not make them look cheap; shapes that were calibrated in a bad moment correct themselves by their deviation.

Both are exponentially weighted medians that begin as if every round so far had agreed with what was known. So

- a disturbance of fewer rounds than the half-life moves neither beyond what undisturbed rounds show, however long
  those rounds took: its weight is below one half;
- a lasting change is believed in full as soon as one half-life of rounds is exceeded.

A mean has neither property: one round of ten seconds, or a clip so tight that learning takes hundreds of rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

Shape = TypeVar("Shape", bound=Hashable)

#: Values kept of a median, in half-lives: those before weigh 2^-5 of all together, and count as what was known first.
_KEPT_HALF_LIVES: Final = 5


class ExponentialMedian:
    """Weighted median of a stream, where weights halve every `half_life` values; `first` stands for all before it."""

    def __init__(self, half_life: int, first: float) -> None:
        fade = 2 ** (-1 / half_life)
        num_kept = _KEPT_HALF_LIVES * half_life
        self._weights: Final = tuple(fade**age for age in range(num_kept + 1))
        self._total: Final = 1 / (1 - fade)  # of an endless stream, and so of `first` and all values together
        self._kept: deque[tuple[float, int]] = deque(maxlen=num_kept)
        self._ordered: list[tuple[float, int]] = []
        self._first = self._value = first
        self.num_values = 0

    def add(self, value: float) -> None:
        """The newest value."""
        if len(self._kept) == self._kept.maxlen:
            del self._ordered[bisect_left(self._ordered, self._kept[0])]
        self._kept.append((value, self.num_values))
        insort(self._ordered, self._kept[-1])
        self.num_values += 1
        self._value = self._median()

    @property
    def value(self) -> float:
        """The least value up to which at least half of the weight lies."""
        return self._value

    def _median(self) -> float:
        # A half-life of new values weighs exactly half: rounding must not put the change off by a round.
        lacking = self._total / 2 - 1e-9
        weights, newest, first = self._weights, self.num_values - 1, self._first
        before, is_counted = self._total * weights[len(self._kept)], False
        for value, number in self._ordered:
            if not is_counted and value >= first:
                is_counted, lacking = True, lacking - before
                if lacking <= 0:
                    return first
            lacking -= weights[newest - number]
            if lacking <= 0:
                return value
        return first


class Correction(Generic[Shape]):
    """The factors of one timed thing, the target's pass or one drafter's proposal.

    `known` is the factor of each shape from an earlier life. A round's deviation is taken from the level as it stands
    one half-life of rounds later, when the level has made up its mind about that round.
    """

    def __init__(self, half_life: int, known: Mapping[Shape, float]) -> None:
        self._half_life = half_life
        logs = {shape: math.log(factor) for shape, factor in known.items()}
        first = sorted(logs.values())[len(logs) // 2] if logs else 0.0
        self._level = ExponentialMedian(half_life, first)
        self._deviations = {shape: ExponentialMedian(half_life, log - first) for shape, log in logs.items()}
        self._pending: deque[tuple[Shape, float]] = deque()

    def observe(self, shape: Shape, ratio: float) -> None:
        """A round nearest to `shape` took `ratio` times what was calibrated for it."""
        log = math.log(ratio)
        self._level.add(log - self._deviation(shape))
        self._pending.append((shape, log))
        if len(self._pending) > self._half_life:
            settled, past = self._pending.popleft()
            median = self._deviations.setdefault(settled, ExponentialMedian(self._half_life, 0.0))
            median.add(past - self._level.value)

    @property
    def level(self) -> float:
        """How much slower than calibrated this is now, over all shapes."""
        return math.exp(self._level.value)

    def factor(self, shape: Shape) -> float:
        """How much slower than calibrated this shape is now."""
        return math.exp(self._level.value + self._deviation(shape))

    def num_rounds(self, shape: Shape) -> int:
        """Rounds nearest to this shape that its deviation rests on."""
        return self._deviations[shape].num_values if shape in self._deviations else 0

    def _deviation(self, shape: Shape) -> float:
        return self._deviations[shape].value if shape in self._deviations else 0.0
