"""No broker at all for a while."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    world.brokers.kill()
    try:
        world.wait(seconds)
    finally:
        world.brokers.start()


FAULT: Final = Fault("Kafka away", "kill -9 of every broker, started again later", Target.KAFKA, _inject)
