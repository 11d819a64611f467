"""What a round costs on this device, measured through the engine's seam, within a budget of time.

The shapes without which no decision can be taken are always measured: the corners, batch 1 and the full batch, width 1
and the widest. What refines them follows, the most useful first, while the budget lasts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.costs import BASE_CONTEXT, CostKind, CostPoint, timing_variance
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import AsksServers, Engine
from alphaloop.errors import AlphaloopError, DecodeFailed
from alphaloop.logs import START_PROGRESS
from alphaloop.settings.processes import WorkerSettings
from worker.costs.laws import loads_up_to

log = logging.getLogger(__name__)
#: Everything is measured in this many passes, because a burst of other work lasts longer than one shape's samples.
NUM_PASSES: Final = 3
_LOGGED_EVERY_S: Final = 5.0
#: Timings of a shape in each of them, of which the median counts.
NUM_SAMPLES: Final = 3
FAR_CONTEXT: Final = 2048
_EACH_WIDTH: Final = 5  #: every width up to it is measured
PROMPT_TOKENS: Final = (64, 512)
#: Sequences grow while a drafter is measured on them.
_ROOM_TO_GROW: Final = 0.5
#: Length of a prompt that is read for its time.
SERVED_PROMPT_TOKENS: Final = 512
#: Variance of ln(one answer's milliseconds a round): a server has other work beside.
ANSWER_VARIANCE: Final = 0.15**2


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one point times; `drafter` is empty for the target, so that shapes can be sorted."""

    drafter: str
    batch: int
    width: int
    context: int
    kind: CostKind = CostKind.ROUND

    @classmethod
    def of(cls, point: CostPoint) -> Shape:
        """The shape of a measured point."""
        return cls(point.drafter or "", point.batch, point.width, point.context, point.kind)

    def measure_ms(self, engine: Engine, num_samples: int) -> float:
        """Median milliseconds on this device."""
        drafter = self.drafter or None
        if self.kind is CostKind.PREFILL:
            return engine.measure_prefill_ms(drafter, self.width, 1)
        return engine.measure_round_ms(drafter, self.batch, self.width, self.context, num_samples)

    def point(self, ms: float, num_samples: int, variance: float) -> CostPoint:
        """What was measured of it."""
        shape = self.drafter or None, self.batch, self.width
        return CostPoint(*shape, ms, num_samples, self.context, self.kind, correction_variance=variance)

    @property
    def num_tokens(self) -> int:
        """A measure of its size, to foresee how long it takes from one that was timed.

        A drafter reads the context before it is timed; what the target looks back on is never read.
        """
        return self.batch * (self.width + self.context if self.drafter else self.width)


@dataclass(frozen=True, slots=True)
class Plan:
    """Shapes in the order in which they are measured."""

    needed: tuple[Shape, ...]  #: measured whatever the time
    #: Measured while the budget lasts, each group whole: half a row of widths would look flat where it ends.
    refining: tuple[tuple[Shape, ...], ...]

    def missing(self, points: Iterable[CostPoint]) -> Plan:
        """The shapes of this plan that `points` lack; none if they have all that are needed."""
        have = {Shape.of(point) for point in points}
        if not (lacking := tuple(shape for shape in self.needed if shape not in have)):
            return Plan((), ())
        groups = (tuple(shape for shape in group if shape not in have) for group in self.refining)
        return Plan(lacking, tuple(group for group in groups if group))


def is_timed_by_step(engine: Engine) -> bool:
    """Whether the times of passes and drafts are known apart: of a device, or of a server that reports its steps."""
    return engine.can_redraft or (isinstance(engine, AsksServers) and engine.times_steps)


def plan(engine: Engine, settings: WorkerSettings, measured: Collection[CostPoint] = ()) -> Plan:
    """What to measure for this engine and these settings.

    A cost is held constant outside what was measured, so every batch size is measured up to the widest pass: those of
    the settings, and those that were `measured` before for a narrower one. Batches, widths and contexts that the
    settings name are needed; where they name none the corners are needed and what lies between refines. Only one of
    the drafters that take the same time is measured.
    """
    length = engine.identity.context_length
    most = settings.batch_size if engine.can_redraft else engine.load().num_slots
    timed = timed_by(engine.drafters)
    drafters = [drafter for drafter in engine.drafters if drafter.name not in timed]
    widest = {drafter.name: drafter.max_draft_tokens + 1 for drafter in drafters}
    # Narrow passes are most, and a device may take other paths from one position to the next; further on by doublings.
    last = max(widest.values(), default=1)
    widths = sorted({*range(1, min(last, _EACH_WIDTH) + 1), *_doublings(1, last, offset=1), last})
    batches = sorted({1, *_doublings(2, most), most})
    needed_widths = {widths[0], widths[-1]}
    needed_batches = {batches[0], batches[-1], *(p.batch for p in measured if p.batch <= batches[-1])}
    longest = int(_ROOM_TO_GROW * length)
    near, *further = sorted({min(context, longest) for context in (BASE_CONTEXT, FAR_CONTEXT)})

    def rounds(of_batches: Iterable[int], of_widths: Iterable[int], context: int) -> list[Shape]:
        """The target's shapes, then each drafter's own up to the widest it can fill; width 1 asks nothing of it."""
        grid = [(batch, width) for batch in sorted(set(of_batches)) for width in sorted(set(of_widths))]
        shapes = [Shape("", batch, width, context) for batch, width in grid]
        for name, own in widest.items():
            mine = dict.fromkeys((batch, min(max(width, 2), own)) for batch, width in grid)
            shapes += [Shape(name, batch, width, context) for batch, width in mine]
        return shapes

    needed = rounds(needed_batches, needed_widths, near)
    # Widths first: between two that were measured a step of the device would look like a slope, and k is chosen there.
    refining = [rounds(needed_batches, [width], near) for width in widths[1:-1]]
    # Without the cost of prompts, a draft that has to read them too would look better than it is.
    readers = {"": longest, **{drafter.name: int(drafter.num_read(longest)) for drafter in drafters}}
    prompts, *longer = (
        [Shape(name, 1, min(num_tokens, num_read), 0, CostKind.PREFILL) for name, num_read in readers.items()]
        for num_tokens in PROMPT_TOKENS
    )
    needed += prompts
    refining += longer
    far = [rounds({batches[0], batches[-1]}, needed_widths, context) for context in further]
    refining += [[s for s in shapes if not s.drafter] for shapes in far]
    refining += [[s for s in shapes if s.drafter] for shapes in far]
    refining += [rounds([batch], needed_widths, near) for batch in batches[1:-1] if batch not in needed_batches]
    have = set(needed)
    return Plan(
        tuple(dict.fromkeys(needed)),
        tuple(tuple(dict.fromkeys(s for s in group if s not in have)) for group in refining if set(group) - have),
    )


def calibrate(
    engine: Engine,
    wanted: Plan,
    *,
    budget_s: float,
    on_measured: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CostPoint]:
    """One point a shape, the least of its medians over the passes.

    Other work on the machine only ever adds to a time, and a decision rests on ratios between shapes, so one shape
    measured in a busy moment would distort every decision. The first pass settles which shapes are measured: a group is
    begun if the time it is foreseen to take fits `budget_s` in all passes. Without a budget each shape is timed once in
    a pass. `on_measured` gets the number of measurements done and the number foreseen.

    Raises DecodeFailed where a needed shape of the target cannot be measured; a group that refines is left out instead.
    So is a drafter that fails, with all its shapes: no decision takes a drafter whose costs are not known.
    """
    began, num_samples = clock(), NUM_SAMPLES if budget_s else 1
    # Texts of a server are real work, and each shows some twenty steps.
    num_passes = NUM_PASSES if engine.can_redraft else 1
    least: dict[Shape, float] = {}
    seconds: dict[Shape, float] = {}
    done, total, logged_at = 0, num_passes * len(wanted.needed), -math.inf

    def measure(shape: Shape) -> None:
        nonlocal done, logged_at
        start = clock()
        logged_at = _log(f"measuring {shape.drafter or 'the target'}, {done + 1} of {total}", start, logged_at)
        median_ms = shape.measure_ms(engine, num_samples)
        seconds[shape] = min(clock() - start, seconds.get(shape, float("inf")))
        least[shape] = min(median_ms, least.get(shape, median_ms))
        done += 1
        on_measured(done, total)

    left_out: set[str] = set()
    for shape in wanted.needed:
        _try(shape, measure, left_out)
    for shapes in wanted.refining:
        group = [shape for shape in shapes if shape.drafter not in left_out]
        foreseen_s = sum(_foresee_s(shape, seconds) for shape in group)
        if num_passes * (clock() - began + foreseen_s) > budget_s:
            continue
        total += num_passes * len(group)
        try:
            for shape in group:
                measure(shape)
        except DecodeFailed as error:
            # A far context in all slots may not fit the memory; decisions can be taken without it.
            log.warning("not measured: %s", error.message, extra={"action": "calibration_skipped"})
            for shape in group:
                least.pop(shape, None)
            total = done + (num_passes - 1) * len(least)
    for _ in range(num_passes - 1):
        for shape in list(least):
            _try(shape, measure, left_out)
    num = num_passes * num_samples
    return [s.point(ms, num, timing_variance(num)) for s, ms in least.items() if s.drafter not in left_out]


def calibrate_servers(
    engine: Engine,
    *,
    budget_s: float,
    on_measured: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CostPoint]:
    """A point for each shape, one answer each, as long as `budget_s` lasts; 0 seconds: none.

    A route that fails to answer is asked no more, because a server that hangs would take the time of the others.
    `on_measured` is called after each point.

    Requests of our own are few, because they are real work. Each shape is asked once: first every route alone, then a
    prompt, then the shortest draft where requests choose it, then the largest load of one server, then doublings below
    it, then a far context. Every request decodes a few dozen tokens. It ends with the budget: a step is begun if the
    time that it is foreseen to take is left. What is not asked is learned from jobs (learning.py).
    """
    began = clock()
    points: list[CostPoint] = []
    away: set[str] = set()
    last_s = last_load = 0.0
    for shapes in steps(engine):
        load = max(shape.batch for shape in shapes)
        foreseen_s = last_s * max(1.0, load / last_load if last_load else 1.0)
        if clock() - began + foreseen_s >= budget_s:
            break
        step_began = clock()
        for shape in shapes:
            if shape.drafter in away or clock() - began >= budget_s:
                continue
            try:
                ms = shape.measure_ms(engine, 1)
            except AlphaloopError as error:
                log.warning("not measured: %s", error.message, extra={"action": "calibration_skipped"})
                away.add(shape.drafter)
                continue
            points.append(shape.point(ms, 1, ANSWER_VARIANCE / shape.batch))
            on_measured()
        last_s, last_load = clock() - step_began, load
    return points


def steps(engine: Engine) -> Iterator[list[Shape]]:
    """Shapes in the order in which they are asked, the most useful first; a step's shapes are one for each route.

    The largest load of a server is its share of the engine's slots; 1 where a server is kept free for other clients.
    """
    num_vanilla = max((drafter.num_vanilla_endpoints for drafter in engine.drafters), default=1)
    endpoints = engine.endpoints() if isinstance(engine, AsksServers) else ()
    most = max(1, engine.load().num_slots // max(1, len(endpoints)))
    if any(endpoint.num_kept for endpoint in endpoints):
        most = 1
    length = engine.identity.context_length
    near, far = (min(context, length // 2) for context in (BASE_CONTEXT, FAR_CONTEXT))

    def rounds(load: int, context: int) -> list[Shape]:
        target = [Shape("", load, 1, context)] if num_vanilla else []
        return target + [
            Shape(drafter.name, load, drafter.max_draft_tokens + 1, context, CostKind.SERVED)
            for drafter in engine.drafters
        ]

    prompt = min(SERVED_PROMPT_TOKENS, length // 2)
    first, *others = loads_up_to(most)
    yield rounds(first, near)
    yield [Shape(shape.drafter, 1, prompt, 0, CostKind.PREFILL) for shape in rounds(first, near)]
    if shortest := [
        Shape(drafter.name, first, drafter.least_draft_tokens + 1, near, CostKind.SERVED)
        for drafter in engine.drafters
        if drafter.least_draft_tokens < drafter.max_draft_tokens
    ]:
        yield shortest
    for load in reversed(others):
        yield rounds(load, near)
    if far > near:
        yield rounds(first, far)


def timed_by(drafters: Sequence[DrafterState]) -> dict[str, str]:
    """By drafter, the drafter whose times it has: among those with its weights the first with the longest drafts.

    Drafters that are measured themselves are not in the mapping.

    Measured apart, drafters that share weights would differ by noise, and rounds would correct only the one in use.
    """
    sharing, longest = [drafter for drafter in drafters if drafter.shared_weights], dict[str, str]()
    for drafter in sorted(sharing, key=lambda drafter: -drafter.max_draft_tokens):
        longest.setdefault(drafter.shared_weights, drafter.name)
    whose = {drafter.name: longest[drafter.shared_weights] for drafter in sharing}
    return {name: other for name, other in whose.items() if name != other}


def _log(doing: str, now: float, logged_at: float) -> float:
    """Log it, unless something was logged a moment ago; returns when something was."""
    if now - logged_at < _LOGGED_EVERY_S:
        return logged_at
    log.info("%s", doing, extra={"action": START_PROGRESS})
    return now


def _try(shape: Shape, measure: Callable[[Shape], None], left_out: set[str]) -> None:
    """Measure a shape, unless its drafter is left out; a drafter that fails is left out from then on."""
    if shape.drafter in left_out:
        return
    try:
        measure(shape)
    except DecodeFailed as error:
        if not shape.drafter:
            raise
        left_out.add(shape.drafter)
        extra = {"action": "drafter_not_measured", "drafter": shape.drafter}
        log.error("%s is not used, because its costs are not known: %s", shape.drafter, error.message, extra=extra)


def _foresee_s(shape: Shape, seconds: dict[Shape, float]) -> float:
    """Seconds that a shape will take: in proportion to its tokens, from the timed one nearest in size."""
    alike = [s for s in seconds if s.drafter == shape.drafter] or list(seconds)
    if not alike:
        return 0.0
    nearest = min(alike, key=lambda s: abs(s.num_tokens - shape.num_tokens))
    return seconds[nearest] * max(1.0, shape.num_tokens / nearest.num_tokens)


def _doublings(first: int, below: int, *, offset: int = 0) -> Iterator[int]:
    """first, 2·first, 4·first …, each plus `offset`, while less than `below`."""
    while first + offset < below:
        yield first + offset
        first *= 2
