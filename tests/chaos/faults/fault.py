"""What a fault is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.world import World


class Target(Enum):
    """What a fault hits. Two faults at the same time hit different things."""

    WORKERS = auto()
    KAFKA = auto()
    POSTGRES = auto()
    NETWORK = auto()


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` hurts the world for so many seconds, then heals what it hurt, and returns."""

    name: str
    what: str  #: for people: what is done
    target: Target
    inject: Callable[[World, random.Random, float], None]
