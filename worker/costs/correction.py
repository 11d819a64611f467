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

The level of a drafter that is not used fades towards the target's, and its doubt grows (`alphaloop.costs.faded`).
Without fading, a drafter that was slow for two seconds is never used again, because only its own rounds could show
that it is fast again. A slowness that has lasted for R of the drafter's own rounds fades more slowly: its half-life is
multiplied by 1 + R / (2 · the correction's half-life). A state that has lasted for long is expected to last (Gott
1993), so a drafter that stays slow is re-checked less and less often.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from alphaloop.costs import LogEstimate, faded, num_half_lives

#: Values kept of a median, in half-lives: older ones weigh 2^-5 of all together and count as `first`.
_KEPT_HALF_LIVES: Final = 5
#: A pause of fewer half-lives does not count, because other tasks' rounds cause short pauses.
_PAUSE: Final = 0.1
#: The least weight of a level against new rounds, after any pause: one round alone shows little.
_LEAST_SHARE: Final = 0.25
#: Levels (logarithms) closer together than this are the same.
_SAME: Final = 0.2
#: The largest factor on the half-life of a slowness, however long it has lasted: five hours.
_MAX_FACTOR: Final = 64.0
Shape = TypeVar("Shape", bound=Hashable)


class Moment(NamedTuple):
    """When something was timed: seconds of a clock, and rounds of the target so far."""

    seconds: float
    num_rounds: int


class Deviation(NamedTuple):
    """The deviation of one shape from the level of what was timed."""

    mean: float  #: of the logarithm
    variance: float
    num_rounds: int  #: real rounds that it rests on


class Correction(Generic[Shape]):
    """The corrections of one part of a round, the target's pass or one drafter's proposal, updated by rounds.

    `known` is the correction of each shape from before. A round's deviation is taken from the level as it stands one
    half-life of rounds later, because only then does the level show whether the device had changed.

    `towards` is ln(the target's level), towards which the level fades without rounds of its own. It is None of the
    target itself, which takes part in every round and does not fade.
    """

    def __init__(self, half_life: int, known: Mapping[Shape, LogEstimate], now: Moment) -> None:
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
        self._used_at = now
        self._held_level, self._num_held = first, 0

    def observe(self, shape: Shape, ratio: float, now: Moment, towards: float | None) -> None:
        """A round nearest to `shape` took `ratio` times what was calibrated for it."""
        half_lives = self._half_lives_unused(now)
        if towards is not None and half_lives >= _PAUSE:
            # After a pause the level has less of its usual weight against the rounds to come; deviations stay.
            level, share = faded(self._estimate, towards, half_lives), max(_LEAST_SHARE, 2.0**-half_lives)
            self._level = ExponentialMedian(self._half_life, level.mean, level.variance, share)
            self._pending.clear()
        self._used_at = now
        self._learn(shape, math.log(ratio))
        self._num_held += 1
        # Below one half the level follows its own rounds rather than the value from before them.
        if self._level.first_share < 0.5 and abs(self.log_level - self._held_level) > _SAME:
            self._held_level, self._num_held = self.log_level, 0

    @property
    def log_level(self) -> float:
        """ln(how much slower than calibrated this was when its last round came), over all shapes."""
        return self._level.value

    def level(self, now: Moment, towards: float | None) -> LogEstimate:
        """How much slower than calibrated this is expected to be, over all shapes."""
        return self._estimate if towards is None else faded(self._estimate, towards, self._half_lives_unused(now))

    def deviation(self, shape: Shape) -> Deviation:
        """How much slower than the level this shape is."""
        median = self._deviations.get(shape)
        return Deviation(median.value, median.variance, median.num_values) if median else Deviation(0.0, 0.0, 0)

    @property
    def _estimate(self) -> LogEstimate:
        return LogEstimate(self._level.value, self._level.variance)

    def _learn(self, shape: Shape, log: float) -> None:
        self._level.add(log - (self._deviations[shape].value if shape in self._deviations else 0.0))
        self._pending.append((shape, log))
        if len(self._pending) > self._half_life:
            settled, past = self._pending.popleft()
            if settled not in self._deviations:
                self._deviations[settled] = ExponentialMedian(self._half_life, 0.0)
            self._deviations[settled].add(past - self._level.value)

    def _half_lives_unused(self, now: Moment) -> float:
        since = self._used_at
        factor = min(1 + self._num_held / (2 * self._half_life), _MAX_FACTOR)
        return num_half_lives(now.seconds - since.seconds, now.num_rounds - since.num_rounds) / factor


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
        self._first = first
        self.value = first  #: the least value up to which at least half of the weight lies
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
        self.value = self._quantile(0.5)
        self._variance = None

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
