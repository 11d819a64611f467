"""What a fault is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.world import World


#: Hurts the world for so many seconds, then heals what it hurt, and returns.
Inject = Callable[["World", random.Random, float], None]


class Target(Enum):
    """What a fault hits. Two faults at the same time hit different things."""

    WORKERS = auto()
    KAFKA = auto()
    POSTGRES = auto()
    NETWORK = auto()


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the world, and what it hits."""

    name: str
    what: str  #: for people: what is done
    target: Target
    inject: Inject


def away(stop: Callable[[World], object], start: Callable[[World], object]) -> Inject:
    """A server is stopped, and started again when the time is over."""

    def inject(world: World, rng: random.Random, seconds: float) -> None:
        stop(world)
        try:
            world.wait(seconds)
        finally:
            start(world)

    return inject
