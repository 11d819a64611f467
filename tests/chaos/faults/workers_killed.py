"""kill -9, at moments drawn by chance."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World

_MEAN_BETWEEN_S: Final = 2.0


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not world.is_ending.is_set():
        if ready := world.fleet.ready():
            world.fleet.kill(rng.choice(ready))
        world.wait(min(seconds / 3, rng.expovariate(1 / _MEAN_BETWEEN_S)))


FAULT: Final = Fault("workers killed", "kill -9 of one worker after the other", Target.WORKERS, _inject)
