"""The switchback experiment of a worker: what assigns arms, and what stores the slices."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime

from alphaloop.deciding.draft_lengths import LengthsTogether
from alphaloop.settings import PolicySettings
from alphaloop.store.database import Database
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.switchback.block import SwitchbackDesign
from alphaloop.switchback.request_block import RequestDesign
from alphaloop.switchback.request_schedule import RequestSchedule
from alphaloop.switchback.schedule import SwitchbackSchedule
from worker.deciding.decider import revisions
from worker.engine import Engine
from worker.jobs.request_steering import RequestSteering
from worker.jobs.round_steering import RoundSteering
from worker.jobs.slices import SliceRecorder
from worker.jobs.steering import Steering


def open_switchback(
    policy: PolicySettings,
    engine: Engine,
    database: Database,
    lengths: LengthsTogether,
    num_peers: Callable[[], int],
    *,
    owner: str,
    now: Callable[[], datetime],
    rng: random.Random,
) -> tuple[Steering, SliceRecorder]:
    """Build both; `rng` draws what is vanilla: slices of rounds, or requests where the engine cannot change those.

    `num_peers`: other workers that ask the same servers.
    """
    share = policy.control_share
    steering: Steering
    if engine.can_redraft:
        schedule = SwitchbackSchedule(SwitchbackDesign(control_share=share), rng)
        steering = RoundSteering(schedule, lengths, now)
    else:
        schedule_of_requests = RequestSchedule(RequestDesign(control_share=share), rng)
        steering = RequestSteering(
            schedule_of_requests, now, num_peers, lambda: all(one.is_whole_load_known for one in engine.endpoints())
        )
    return steering, SliceRecorder(SwitchbackStore(database), engine.identity, revisions(engine), owner=owner, now=now)
