"""One broker of several killed and missing for a while; the only broker is killed and started at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    number = rng.randrange(world.brokers.num_nodes)
    world.brokers.kill([number])
    try:
        if world.brokers.num_nodes > 1:
            world.wait(seconds)
    finally:
        world.brokers.start([number])


FAULT: Final = Fault("broker lost", "kill -9 of one broker, started again later", Target.KAFKA, _inject)
