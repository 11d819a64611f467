"""Postgres ends and comes back at once: by an orderly shutdown, and by kill -9."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    for end in rng.sample((world.postgres.stop, world.postgres.kill), 2):
        end()
        world.postgres.start()
        world.wait(seconds / 2)


FAULT: Final = Fault("Postgres bounced", "Postgres shut down, killed, started again at once", Target.POSTGRES, _inject)
