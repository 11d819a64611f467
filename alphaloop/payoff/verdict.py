"""Ship, do not ship, or too close: a ratio's bounds against the bar. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from alphaloop.payoff.bounds import Bounds, min_values

#: A further run settles it with 80 % probability: (1.96 + .84) / 1.96 times the room that the bounds need.
_POWER: Final = 1.43
#: Beyond so many values nobody measures: the ratio is the bar.
_MOST: Final = 2000


class Verdict(StrEnum):
    """What the figures say about one candidate."""

    SHIP = "ship"  #: the lower bound of the ratio of all tokens reaches the bar, and is above 1
    DO_NOT_SHIP = "do not ship"  #: the upper bound is below the bar, or a text is wrong
    TOO_CLOSE = "too close"  #: the bar lies between the bounds


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and what it would take to settle one that is too close."""

    verdict: Verdict
    num_more: int | None = None  #: further values; None: settled, or as good as at the bar


def judge(bounds: Bounds, bar: float, num_comparisons: int, *, is_exact: bool = True) -> Judgement:
    """Of a candidate whose ratio to vanilla, of all tokens, has these bounds.

    Who writes another text than vanilla never ships, nor who may be slower than vanilla, however low the bar is.
    """
    if not is_exact:
        return Judgement(Verdict.DO_NOT_SHIP)
    if bounds.known is None:
        return Judgement(Verdict.TOO_CLOSE, max(1, min_values(num_comparisons) - bounds.num_values))
    low, high = bounds.known
    if low >= bar and low > 1:
        return Judgement(Verdict.SHIP)
    if high < bar:
        return Judgement(Verdict.DO_NOT_SHIP)
    return Judgement(Verdict.TOO_CLOSE, _num_more(bounds.estimate, low, high, bar, bounds.num_values))


def _num_more(estimate: float, low: float, high: float, bar: float, num_values: int) -> int | None:
    """Bounds narrow with the square root of the number of values; ratios are compared by their logarithms."""
    distance = abs(math.log(estimate / bar))
    room = math.log(estimate / low) if estimate >= bar else math.log(high / estimate)
    if distance * math.sqrt(_MOST / num_values) <= _POWER * room:
        return None
    return max(1, math.ceil(num_values * (_POWER * room / distance) ** 2) - num_values)
