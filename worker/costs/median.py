"""A robust mean of a stream: an exponentially weighted median, and how sure it is."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

#: Values kept of a median, in half-lives: older ones weigh 2^-5 of all together and count as `first`.
_KEPT_HALF_LIVES: Final = 5


class ExponentialMedian:
    """Weighted median of a stream, where weights halve every `half_life` values; `first` stands for all before it.

    `first` is known with a variance of `first_variance`. It begins with the weight of an endless stream, or with
    `first_share` of that weight, where it is doubtful and new values have to outweigh it sooner.
    """

    def __init__(self, half_life: int, first: float, first_variance: float = 0.0, first_share: float = 1.0) -> None:
        fade = 2 ** (-1 / half_life)
        num_kept = _KEPT_HALF_LIVES * half_life
        self._half_life = half_life
        self._weights: Final = tuple(fade**age for age in range(num_kept + 1))
        self._endless: Final = 1 / (1 - fade)  # weight of an endless stream
        self._effective: Final = (1 + fade) / (1 - fade)  # values of equal weight in it: (Σw)² / Σw², Kish 1965
        self._kept: deque[tuple[float, int]] = deque(maxlen=num_kept)
        self._ordered: list[tuple[float, int]] = []
        self._first = self._value = first
        self._first_variance, self._lacking_share = first_variance, 1 - first_share
        self._variance: float | None = None
        self.num_values = 0

    def add(self, value: float) -> None:
        """The newest value."""
        if len(self._kept) == self._kept.maxlen:
            del self._ordered[bisect_left(self._ordered, self._kept[0])]
        self._kept.append((value, self.num_values))
        insort(self._ordered, self._kept[-1])
        self.num_values += 1
        self._value = self._quantile(0.5)
        self._variance = None

    @property
    def value(self) -> float:
        """The least value up to which at least half of the weight lies."""
        return self._value

    @property
    def variance(self) -> float:
        """Variance of `value`: that of `first` in proportion to its share of the weight, plus that of a median.

        The latter is Woodruff's (1952): the values at which the weighted distribution passes 1/2 ± 1/(2·√n), with n the
        effective number of values, lie two standard deviations apart. It takes values to be independent; a spell of
        slow ones makes it too small.
        """
        if self._variance is None:
            error = 0.5 / math.sqrt(self._effective * self._total / self._endless)
            low, high = self._quantile(max(0.0, 0.5 - error)), self._quantile(min(1.0, 0.5 + error))
            self._variance = self.first_share * self._first_variance + ((high - low) / 2) ** 2
        return self._variance

    @property
    def first_share(self) -> float:
        """Share of the weight that `first` has; below one half, `value` is the stream's."""
        return self._first_weight / self._total

    @property
    def _total(self) -> float:
        """Weight of `first` and of all values together."""
        return self._endless * (1 - self._lacking_share * 2 ** (-self.num_values / self._half_life))

    @property
    def _first_weight(self) -> float:
        return max(0.0, self._total - self._endless * (1 - self._weights[len(self._kept)]))

    def _quantile(self, share: float) -> float:
        # A half-life of new values weighs exactly half: rounding must not put the change off by a value.
        lacking = self._total * share - 1e-9
        weights, newest, first = self._weights, self.num_values - 1, self._first
        before, is_counted = self._first_weight, False
        for value, number in self._ordered:
            if not is_counted and value >= first:
                is_counted, lacking = True, lacking - before
                if lacking <= 0:
                    return first
            lacking -= weights[newest - number]
            if lacking <= 0:
                return value
        return first if not is_counted else self._ordered[-1][0]
