"""No Postgres for a while."""

from __future__ import annotations

from typing import Final

from tests.chaos.faults.fault import Fault, Target, away

FAULT: Final = Fault(
    "Postgres away",
    "Postgres shut down, started again later",
    Target.POSTGRES,
    away(lambda world: world.postgres.stop(), lambda world: world.postgres.start()),
)
