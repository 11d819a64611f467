"""The laws of one kind of time, of rounds or of prompts, on all routes to servers; they lean on each other.

The vanilla route's law stands on its own times. Another route's law a priori follows it, so that a route with few
requests is known at all loads about as vanilla is. Where vanilla has no times, the route with most of them leads.

A server may follow requests in how long they draft. Then its route has a law of all lengths (length_law.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from alphaloop.cost_doubt import PRIOR_SD
from worker.costs.length_law import LengthLaw, assumed_lengths, fitted_lengths
from worker.costs.time_law import Time, fitted, usual

#: A drafter, or None, the vanilla route.
Route: TypeAlias = str | None

#: Times that are kept, in half-lives: older ones weigh 2^-4.
_KEPT_HALF_LIVES: Final = 4
#: Of the ratio of a route's times to the leading route's, how much it changes from one size to the double.
_STEP_SD: Final = 0.2
#: A law is fitted anew at most so often; but the first times of a route count at once.
FITTED_EVERY_S: Final = 1.0
_FIRST_TIMES: Final = 8


@dataclass(frozen=True, slots=True)
class UsualShape:
    """What is assumed of the leading route before any time."""

    nodes: tuple[float, ...]
    values: tuple[float, ...]  #: times at the nodes, in proportion
    slope_sd: float  #: of the change to the second node, as a share of the first value


@dataclass(slots=True)
class _Learned:
    times: deque[Time]
    taken_s: float  #: when the last one was
    num_longest: int = 0  #: times ever taken with the longest draft, those before this process included
    num_shorter: int = 0  #: with a shorter one
    law: LengthLaw | None = None
    is_new: bool = False  #: whether times came since the law was fitted
    fitted_s: float = -math.inf


class RouteLaws:
    """Of the routes in `assumed`, which says what each takes in proportion, with nothing known."""

    def __init__(self, assumed: Mapping[Route, float], shape: UsualShape, *, half_life: int, now: float) -> None:
        self.nodes: Final = shape.nodes
        self._assumed, self._shape, self._half_life = assumed, shape, half_life
        most = _KEPT_HALF_LIVES * half_life
        self._routes = {route: _Learned(deque(maxlen=most), now) for route in assumed}

    def take(self, route: Route, taken: Time, now: float) -> None:
        """A time of a request."""
        learned = self._routes[route]
        learned.times.append(taken)
        learned.num_shorter += taken.length < 1
        learned.num_longest += taken.length >= 1
        learned.is_new, learned.taken_s = True, now

    def take_stored(self, route: Route, taken: Time, num_times: int) -> None:
        """A value from before, that rested on so many times; before any request."""
        learned = self._routes[route]
        learned.times.append(taken)
        if taken.length < 1:
            learned.num_shorter = max(learned.num_shorter, num_times)
        else:
            learned.num_longest = max(learned.num_longest, num_times)
        learned.is_new = True

    def fit(self, now: float, *, pause_s: float = FITTED_EVERY_S) -> bool:
        """Fit anew where times came and `pause_s` have passed; whether any law may have changed.

        The first times of a route do not wait.
        """
        if not any(self._is_due(its, now, pause_s) for its in self._routes.values()):
            return False
        first = self._leading()
        times, shape = list(self._routes[first].times), self._shape
        priors = {first: usual(self.nodes, shape.values, times, shape.slope_sd)}
        laws = {first: fitted(self.nodes, times, priors[first], self._half_life)}
        for route, its in self._routes.items():
            if route != first:
                ratio = self._assumed[route] / self._assumed[first]
                priors[route] = laws[first].as_prior(ratio, PRIOR_SD, _STEP_SD)
                laws[route] = fitted(self.nodes, list(its.times), priors[route], self._half_life)
            its.is_new, its.fitted_s = False, now
        for route, its in self._routes.items():
            its.law = assumed_lengths(laws[route], laws[None])
            if any(taken.length < 1 for taken in its.times):
                its.law = fitted_lengths(self.nodes, list(its.times), priors[route], laws[None], self._half_life)
        return True

    def law(self, route: Route) -> LengthLaw | None:
        """As last fitted; None while no route has times."""
        return self._routes[route].law

    def num_times(self, route: Route, *, length: float = 1.0) -> int:
        """Times that its law rests on: of the longest draft, or of shorter ones."""
        its = self._routes[route]
        return its.num_longest if length >= 1 else its.num_shorter

    def seconds_unused(self, route: Route, now: float) -> float:
        """Since the last time of the route, or since the beginning."""
        return now - self._routes[route].taken_s

    def _leading(self) -> Route:
        if self._routes[None].times:
            return None
        return max(self._routes, key=lambda route: len(self._routes[route].times))

    @staticmethod
    def _is_due(its: _Learned, now: float, pause_s: float) -> bool:
        is_first = its.num_longest + its.num_shorter < _FIRST_TIMES
        return its.is_new and (is_first or now - its.fitted_s >= pause_s)


def loads_up_to(most: int) -> Sequence[int]:
    """1, 2, 4 … and `most`."""
    loads = [1]
    while 2 * loads[-1] < most:
        loads.append(2 * loads[-1])
    return loads if most <= 1 else [*loads, most]
