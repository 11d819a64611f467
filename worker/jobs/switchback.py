"""The switchback experiment of a worker: what steers the rounds of its slices, and what stores them."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime

from alphaloop.deciding.lengths_together import LengthsTogether
from alphaloop.settings import PolicySettings
from alphaloop.store.database import Database
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.switchback.block import SwitchbackDesign
from alphaloop.switchback.schedule import SwitchbackSchedule
from worker.costs.known import KnownCosts
from worker.deciding.opening import revisions
from worker.engine import Engine
from worker.jobs.slices import SliceRecorder
from worker.jobs.steering import Steering


def open_switchback(
    policy: PolicySettings,
    engine: Engine,
    database: Database,
    costs: KnownCosts,
    *,
    owner: str,
    now: Callable[[], datetime],
    rng: random.Random,
) -> tuple[Steering, SliceRecorder]:
    """Build both; `rng` draws which slices are vanilla."""
    design = SwitchbackDesign(control_share=policy.control_share)
    steering = Steering(SwitchbackSchedule(design, rng), LengthsTogether(lambda: costs.table), now)
    return steering, SliceRecorder(SwitchbackStore(database), engine.identity, revisions(engine), owner=owner, now=now)
