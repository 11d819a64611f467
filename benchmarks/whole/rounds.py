"""Who plays when: every contestant once a round, in an order drawn at random."""

from __future__ import annotations

import random
from collections.abc import Collection

WORKER = "worker"  #: of this checkout
ENGINE = "engine"  #: fed directly, each job with the drafter and k that the worker reported for it
ENGINE_VANILLA = "engine, vanilla"
BASELINE = "baseline"  #: the worker of another commit
VLLM = "vllm"
CONTESTANTS = (WORKER, ENGINE, ENGINE_VANILLA, BASELINE, VLLM)


def draw_order(contestants: Collection[str], rng: random.Random) -> list[str]:
    """A random order. The engine needs the worker's decisions of the same round, so that it plays behind the worker."""
    order = sorted(contestants)
    rng.shuffle(order)
    if WORKER in order and ENGINE in order:
        places = sorted((order.index(WORKER), order.index(ENGINE)))
        order[places[0]], order[places[1]] = WORKER, ENGINE
    return order
