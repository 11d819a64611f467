"""Corrections of drafters that may be unused: the estimate fades towards the target's, and its doubt grows.

Without fading, a drafter that was slow for two seconds is never used again, because only its own rounds could show
that it is fast again. alphaloop/cost_doubt.py has the formula.

A slowness that has lasted for R of the drafter's own rounds fades more slowly: its half-life is multiplied by
1 + R / (2 · the correction's half-life). A state that has lasted for long is expected to last (Gott 1993), so a
drafter that stays slow is re-checked less and less often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, NamedTuple

from alphaloop.cost_doubt import LogEstimate, faded, num_half_lives
from alphaloop.cost_state import Deviation
from worker.costs.correction import Correction, Shape

#: A pause of fewer half-lives does not count, because other tasks' rounds cause short pauses.
_PAUSE: Final = 0.1
#: The least weight of a level against new rounds, after any pause: one round alone shows little.
_LEAST_SHARE: Final = 0.25
#: Levels (logarithms) closer together than this are the same.
_SAME: Final = 0.2
#: The largest factor on the half-life of a slowness, however long it has lasted: five hours.
_MAX_FACTOR: Final = 64.0


class Moment(NamedTuple):
    """When something was timed: seconds of a clock, and rounds of the target so far."""

    seconds: float
    num_rounds: int


class FadingCorrection(Generic[Shape]):
    """A correction with the time since its last round. `towards` is ln(the target's level) at that moment.

    None in its place is for the target itself, which takes part in every round and does not fade.
    """

    def __init__(self, half_life: int, known: Mapping[Shape, LogEstimate], now: Moment) -> None:
        self._correction = Correction(half_life, known)
        self._slowing_rounds = 2 * half_life
        self._used_at = now
        self._held_level, self._num_held = self._correction.log_level, 0

    def observe(self, shape: Shape, ratio: float, now: Moment, towards: float | None) -> None:
        """A round nearest to `shape` took `ratio` times what was calibrated for it."""
        half_lives = self._half_lives_unused(now)
        if towards is not None and half_lives >= _PAUSE:
            share = max(_LEAST_SHARE, 2.0**-half_lives)
            self._correction.resume(faded(self._correction.level, towards, half_lives), share)
        self._used_at = now
        self._correction.observe(shape, ratio)
        self._num_held += 1
        level = self._correction.log_level
        if self._correction.has_settled and abs(level - self._held_level) > _SAME:
            self._held_level, self._num_held = level, 0

    @property
    def log_level(self) -> float:
        """ln(how much slower than calibrated this was when its last round came)."""
        return self._correction.log_level

    def level(self, now: Moment, towards: float | None) -> LogEstimate:
        """How much slower than calibrated this is expected to be, over all shapes."""
        level = self._correction.level
        return level if towards is None else faded(level, towards, self._half_lives_unused(now))

    def deviation(self, shape: Shape) -> Deviation:
        """How much slower than the level this shape is."""
        return self._correction.deviation(shape)

    def _half_lives_unused(self, now: Moment) -> float:
        since = self._used_at
        factor = min(1 + self._num_held / self._slowing_rounds, _MAX_FACTOR)
        return num_half_lives(now.seconds - since.seconds, now.num_rounds - since.num_rounds) / factor
