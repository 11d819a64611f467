"""What rounds cost on servers, asked with requests of our own before any job: few of them, because they are real work.

Each shape is asked once: first every route alone, then a prompt, then the shortest draft where requests choose it,
then the largest load of one server, then doublings below it, then a far context. Every request decodes a few dozen
tokens. It ends with the budget: a step is begun if the time that it is foreseen to take is left. What is not asked is
learned from jobs (from_requests.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from alphaloop.cost import BASE_CONTEXT, CostKind, CostPoint
from alphaloop.errors import AlphaloopError
from worker.costs.calibration import FAR_CONTEXT, Shape
from worker.costs.route_laws import loads_up_to
from worker.engine import AsksServers, Engine

log = logging.getLogger(__name__)

#: Of a prompt that is read for its time.
PROMPT_TOKENS: Final = 512
#: Variance of ln(one answer's milliseconds a round): a server has other work beside.
ANSWER_VARIANCE: Final = 0.15**2


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
    """
    began = clock()
    found: list[CostPoint] = []
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
            point = CostPoint(
                shape.drafter or None,
                shape.batch,
                shape.width,
                ms,
                1,
                shape.context,
                shape.kind,
                correction_variance=ANSWER_VARIANCE / shape.batch,
            )
            found.append(point)
            on_measured()
        last_s, last_load = clock() - step_began, load
    return found


def steps(engine: Engine) -> Iterator[list[Shape]]:
    """Shapes in the order in which they are asked, the most useful first; a step's shapes are one for each route.

    The largest load of a server is its share of the engine's slots.
    """
    num_vanilla = max((drafter.num_vanilla_endpoints for drafter in engine.drafters), default=1)
    num_endpoints = len(engine.endpoints()) if isinstance(engine, AsksServers) else 1
    most = max(1, engine.load().num_slots // max(1, num_endpoints))
    length = engine.identity.context_length
    near, far = (min(context, length // 2) for context in (BASE_CONTEXT, FAR_CONTEXT))

    def rounds(load: int, context: int) -> list[Shape]:
        target = [Shape("", load, 1, context)] if num_vanilla else []
        served = [
            Shape(drafter.name, load, drafter.max_draft_tokens + 1, context, CostKind.SERVED)
            for drafter in engine.drafters
        ]
        return target + served

    prompt = min(PROMPT_TOKENS, length // 2)
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
