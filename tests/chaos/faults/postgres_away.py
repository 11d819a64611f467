"""No Postgres for a while."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    world.postgres.stop()
    try:
        world.wait(seconds)
    finally:
        world.postgres.start()


FAULT: Final = Fault("Postgres away", "Postgres shut down, started again later", Target.POSTGRES, _inject)
