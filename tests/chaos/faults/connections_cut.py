"""Connections to Postgres reset: all at once, before a COMMIT arrives, after one did; or held for a while."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World

_MEAN_BETWEEN_S: Final = 0.7
_HELD_S: Final = 3.0


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    until, proxy = time.monotonic() + seconds, world.proxy
    kinds = ("commit lost", "commit not answered", "all", "held")
    while time.monotonic() < until and not world.is_ending.is_set():
        kind = rng.choices(kinds, weights=(4, 4, 2, 1))[0]
        if kind == "all":
            proxy.cut()
        elif kind == "held":
            proxy.hold()
            world.wait(min(_HELD_S, seconds / 3))
            proxy.release()
        else:
            lost = kind == "commit lost"
            proxy.cut_commits(rng.randint(1, 3) if lost else 0, 0 if lost else rng.randint(1, 3))
        world.wait(rng.expovariate(1 / _MEAN_BETWEEN_S))
    proxy.cut_commits(0, 0)


FAULT: Final = Fault(
    "connections cut", "connections to Postgres reset, many of them in mid-commit", Target.NETWORK, _inject
)
