"""Costs of servers, learned from the requests that they answered.

Nobody can time a round inside a server. But each request tells how long its rounds took on average, with how many
others in flight, and at what context. Of each route, the vanilla one and each drafter's, these times are a regression
(time_law.py), and its values at a few loads and contexts are the points of the cost table. What was calibrated or
stored before counts as times that were taken before all others.

Where requests choose their draft length, the law has a slope over it (length_law.py), and the route has points for the
shortest draft and for the longest.

With nothing known of it, a route takes `ASSUMED_RATIO` of what vanilla takes, within a factor of 2.2: so it is tried
where that may pay, and its first requests tell. Routes without new times grow doubtful, as drafters do on a device
(cost_doubt.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.cost import BASE_CONTEXT, CostKind, CostPoint, CostTable
from alphaloop.cost_doubt import LogEstimate, faded, num_half_lives
from alphaloop.cost_state import CostBasis, CostState, Deviation
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import StoreError
from worker.costs.length_law import LengthLaw
from worker.costs.route_laws import FITTED_EVERY_S, Route, RouteLaws, UsualShape, loads_up_to
from worker.costs.time_law import Time
from worker.costs.timed_requests import timed
from worker.engine import Step

log = logging.getLogger(__name__)

#: A round with drafts takes so many times a vanilla one, with nothing known of that server: the pass is wider, and
#: something drafts.
ASSUMED_RATIO: Final = 1.25
#: Requests behind a half-life, for each round of `half_life`: they vary more than rounds.
_REQUESTS_A_ROUND: Final = 4
FAR_CONTEXT: Final = 2048
#: Reading takes in proportion to the tokens of a prompt, and a little more.
_PROMPTS: Final = UsualShape((64.0, 512.0, 4096.0), (0.5, 1.0, 5.0), 2.0)
#: Of a further request in flight, in proportion to the first: mean and standard deviation.
_LOAD_SLOPE, _LOAD_SLOPE_SD = 0.05, 0.3
#: A table has the doubt of the moment when it was made, and is made again after so long.
_TABLE_LASTS_S: Final = 10.0
#: A stored point stands for times that other points of its law share.
_STORED_SHARE: Final = 2.0
#: A logarithm that moved by less is no news.
_NEWS: Final = math.log(1.01)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What one point of the table is about."""

    route: Route
    kind: CostKind
    size: int  #: requests in flight, or tokens of a prompt
    context: int
    width: int = 1  #: draft tokens and one; 1 of a prompt
    length: float = 1.0  #: draft tokens, as a share of the route's longest draft


class RequestCosts:
    """The costs of the routes to servers. One thread owns it; others may ask `level` and `read_s`.

    `points` are what was calibrated or stored. `most_in_flight` is the largest load that one server may get.
    `save` is given points in place of those stored, at most every `save_every_s`. `clock` tells seconds from any
    beginning.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterState],
        points: Sequence[CostPoint],
        *,
        most_in_flight: int,
        half_life: int,
        save: Callable[[Sequence[CostPoint]], object],
        save_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters: dict[Route, DrafterState | None] = {None: None} | {d.name: d for d in drafters}
        self._clock, self._save, self._save_every_s = clock, save, save_every_s
        self._due = clock() + save_every_s
        loads = tuple(map(float, loads_up_to(most_in_flight)))
        slopes = UsualShape(loads, tuple(1 + _LOAD_SLOPE * (load - 1) for load in loads), _LOAD_SLOPE_SD)
        half_life, now = _REQUESTS_A_ROUND * half_life, clock()
        assumed: dict[Route, float] = {route: ASSUMED_RATIO if route else 1.0 for route in self._drafters}
        self._rounds = RouteLaws(assumed, slopes, half_life=half_life, now=now)
        self._prompts = RouteLaws(dict.fromkeys(self._drafters, 1.0), _PROMPTS, half_life=half_life, now=now)
        self._first_ms: dict[_Shape, float] = {}  # of each shape, when it was first known
        self._shapes: tuple[_Shape, ...] = ()
        self._basis = CostBasis((), {})
        self._made: tuple[float, CostState, CostTable] | None = None
        self._saved: dict[_Shape, float] = {}
        self._has_learned = False
        for point in points:
            self._take_stored(point)

    @property
    def parts(self) -> tuple[Route, ...]:
        """None, the vanilla route, and the drafters."""
        return tuple(self._drafters)

    @property
    def table(self) -> CostTable:
        """The costs as `refresh` left them, with a route's first times; empty before the first time of any route."""
        return self._at_hand(math.inf)[2]

    @property
    def state(self) -> CostState:
        """What `table` was made from when it was last asked for."""
        return (self._made or self._at_hand(math.inf))[1]

    def level(self, part: Route) -> float:
        """How much slower a route is than when it was first known, with one request in flight; 1 before that."""
        law = self._rounds.law(part)
        first_ms = self._first_ms.get(self._shapes_of(part, 1, BASE_CONTEXT)[-1])
        return 1.0 if law is None or first_ms is None else math.exp(law.at(1).mean) / first_ms

    def read_s(self, num_tokens: int) -> float:
        """Seconds in which a server on which nothing drafts reads so many tokens of a prompt; 0 if not known."""
        law = self._prompts.law(None)
        return math.exp(law.at(num_tokens).mean) / 1000 if law is not None and num_tokens > 0 else 0.0

    def observe(self, step: Step) -> None:
        """Learn from the texts that ended in a step."""
        now = self._clock()
        for generation in step.finished:
            for found in timed(generation):
                if found.drafter in self._drafters:
                    length = 1.0 if found.kind is CostKind.PREFILL else self._length(found.drafter, found.width)
                    self._laws(found.kind).take(found.drafter, found.time._replace(length=length), now)
                    self._has_learned = True

    def refresh(self) -> None:
        """Fit the laws to the times that came, at most once a second: that takes some milliseconds."""
        self._at_hand(FITTED_EVERY_S)

    def save_when_due(self) -> bool:
        """Store what was learned if it is time and there is news; True if it was stored."""
        if self._clock() < self._due:
            return False
        self._due = self._clock() + self._save_every_s
        return self.save()

    def save(self) -> bool:
        """Store the points of routes that were timed, if any moved; a database that is away is tried again later."""
        if not self._has_learned:
            return False
        points = self._at_hand(0.0)[1].points()
        moved = dict(zip(self._shapes, (math.log(point.ms) for point in points), strict=True))
        if not any(abs(value - self._saved.get(shape, math.inf)) >= _NEWS for shape, value in moved.items()):
            return False
        counted = [self._num_times(shape) for shape in self._shapes]
        try:
            self._save(
                [
                    replace(point, median_ms=point.ms, num_samples=number, correction=1.0, num_corrections=0)
                    for point, number in zip(points, counted, strict=True)
                    if number
                ]
            )
        except StoreError as error:
            log.warning("costs of servers not stored: %s", error.message, extra={"action": "costs_not_saved"})
            return False
        self._saved, self._has_learned = moved, False
        return True

    def _laws(self, kind: CostKind) -> RouteLaws:
        return self._prompts if kind is CostKind.PREFILL else self._rounds

    def _take_stored(self, point: CostPoint) -> None:
        """As a time from before: its error is what is stored with it."""
        if point.drafter not in self._drafters:
            return
        size = point.width if point.kind is CostKind.PREFILL else point.batch
        context = BASE_CONTEXT if point.kind is CostKind.PREFILL else point.context
        variance = _STORED_SHARE * max(point.correction_variance, 1e-4)
        length = 1.0 if point.kind is CostKind.PREFILL else self._length(point.drafter, point.width)
        taken = Time(float(size), float(context), point.ms, variance, is_relative=False, length=length)
        self._laws(point.kind).take_stored(point.drafter, taken, point.num_samples)

    def _at_hand(self, pause_s: float) -> tuple[float, CostState, CostTable]:
        """The table, made again where a law was fitted or the table's doubt is old."""
        now = self._clock()
        has_moved = [laws.fit(now, pause_s=pause_s) for laws in (self._rounds, self._prompts)]
        if self._made is None or any(has_moved) or now - self._made[0] >= _TABLE_LASTS_S:
            state = self._state_at(now)
            self._made = now, state, state.table()
        return self._made

    def _state_at(self, now: float) -> CostState:
        known = dict(self._known())
        shapes = tuple(known)
        if shapes != self._shapes:
            for shape, law in known.items():
                self._first_ms.setdefault(shape, math.exp(_at(law, shape).mean))
            self._shapes, self._basis = shapes, CostBasis(tuple(map(self._first_point, shapes)), {})
        deviations = []
        for shape, law in known.items():
            estimate = _at(law, shape)
            mean = estimate.mean - math.log(self._first_ms[shape])
            deviations.append(Deviation(mean, estimate.variance, self._num_times(shape)))
        return CostState(self._basis, {route: self._doubt(route, now) for route in self._drafters}, tuple(deviations))

    def _known(self) -> Iterator[tuple[_Shape, LengthLaw]]:
        for route in self._drafters:
            if (law := self._rounds.law(route)) is not None:
                for context in (BASE_CONTEXT, FAR_CONTEXT):
                    yield from ((shape, law) for n in law.nodes for shape in self._shapes_of(route, int(n), context))
            if (law := self._prompts.law(route)) is not None:
                yield from ((_Shape(route, CostKind.PREFILL, int(n), BASE_CONTEXT), law) for n in law.nodes)

    def _shapes_of(self, route: Route, load: int, context: int) -> list[_Shape]:
        """Rounds with the shortest and the longest draft, of which the second may be the only one."""
        drafter = self._drafters[route]
        if drafter is None:
            return [_Shape(route, CostKind.ROUND, load, context)]
        widths = sorted({drafter.least_draft_tokens + 1, drafter.max_draft_tokens + 1})
        return [_Shape(route, CostKind.SERVED, load, context, w, self._length(route, w)) for w in widths]

    def _length(self, route: Route, width: int) -> float:
        """The draft of such a round, as a share of the route's longest draft; 1 where it has one length."""
        drafter = self._drafters[route]
        if drafter is None or drafter.least_draft_tokens == drafter.max_draft_tokens:
            return 1.0
        return drafter.within(width - 1) / drafter.max_draft_tokens

    def _num_times(self, shape: _Shape) -> int:
        return self._laws(shape.kind).num_times(shape.route, length=shape.length)

    def _first_point(self, shape: _Shape) -> CostPoint:
        ms = self._first_ms[shape]
        if shape.kind is CostKind.PREFILL:
            return CostPoint(shape.route, 1, shape.size, ms, 0, 0, shape.kind)
        return CostPoint(shape.route, shape.size, shape.width, ms, 0, shape.context, shape.kind)

    def _doubt(self, route: Route, now: float) -> LogEstimate:
        """What grows while a route gets no requests: another's load, or a restart, may have changed its speed."""
        unused_s = self._rounds.seconds_unused(route, now)
        return faded(LogEstimate(0.0, 0.0), 0.0, num_half_lives(unused_s))


def _at(law: LengthLaw, shape: _Shape) -> LogEstimate:
    return law.at(shape.size, shape.context, length=shape.length)
