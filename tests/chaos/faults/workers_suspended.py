"""SIGSTOP for longer than session and lease, then SIGCONT: the worker wakes up and believes that it owns its jobs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    num_workers = len(world.fleet.members)
    chosen = rng.sample(range(num_workers), max(1, num_workers // 2))
    try:
        for number in chosen:
            world.fleet.suspend(number)
        world.wait(max(seconds, 1.5 * (world.size.session_timeout_s + world.size.lease_s)))
    finally:
        for number in chosen:
            world.fleet.resume(number)


FAULT: Final = Fault(
    "workers suspended", "SIGSTOP of half the workers past session and lease, then SIGCONT", Target.WORKERS, _inject
)
