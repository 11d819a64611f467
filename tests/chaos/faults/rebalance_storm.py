"""Every worker leaves and joins again and again: half by kill -9, half by SIGTERM."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World

#: Between two looks for workers that have joined, and how long it may take on a busy machine.
_LOOK_S: Final = 0.3
_MOST_S: Final = 600.0


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    fleet, left = world.fleet, dict.fromkeys(range(len(world.fleet.members)), world.size.num_storm_restarts)
    until = time.monotonic() + _MOST_S
    while any(left.values()):
        if time.monotonic() > until:
            raise TimeoutError(f"workers were too slow to come back for a storm; restarts left: {left}")
        if world.is_ending.is_set():
            return
        for number in fleet.ready():
            if left[number]:
                left[number] -= 1
                rng.choice((fleet.kill, fleet.terminate))(number)
        world.wait(_LOOK_S)


FAULT: Final = Fault(
    "rebalance storm", "every worker restarted as soon as it has joined, many times", Target.WORKERS, _inject
)
