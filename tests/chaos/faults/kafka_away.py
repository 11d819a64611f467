"""No broker at all for a while."""

from __future__ import annotations

from typing import Final

from tests.chaos.faults.fault import Fault, Target, away

FAULT: Final = Fault(
    "Kafka away",
    "kill -9 of every broker, started again later",
    Target.KAFKA,
    away(lambda world: world.brokers.kill(), lambda world: world.brokers.start()),
)
