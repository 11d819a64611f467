"""Postgres becomes read-only, as a primary does that was demoted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    with world.administrator() as connection:
        try:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            world.wait(seconds)
        finally:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")


FAULT: Final = Fault("read-only", "Postgres refuses every write: SQLSTATE 25006", Target.POSTGRES, _inject)
