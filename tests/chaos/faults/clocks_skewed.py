"""Clocks that are an hour wrong: half the workers are ahead, half behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World

_HOUR_S: Final = 3600.0


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    numbers = range(len(world.fleet.members))
    ahead = set(rng.sample(numbers, len(numbers) // 2 or 1))
    try:
        for number in numbers:
            world.fleet.set_clock(number, _HOUR_S if number in ahead else -_HOUR_S)
        world.wait(seconds)
    finally:
        for number in numbers:
            world.fleet.set_clock(number, 0.0)


FAULT: Final = Fault(
    "clocks skewed", "half the workers' clocks an hour ahead, half an hour behind", Target.WORKERS, _inject
)
