"""One phase of a run: faults together, then time to catch up, and what was seen meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from tests.chaos.faults import FAULTS
from tests.chaos.plan import Phase
from tests.chaos.watcher import first_growth_s, longest_silence_s
from tests.chaos.world import World

_LOOK_S: Final = 0.5
#: A backlog of so many seconds of jobs counts as caught up.
_CAUGHT_UP_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """What a phase showed."""

    faults: tuple[str, ...]
    fault_s: float
    num_sent: int  #: while the fault lasted
    num_ended: int  #: jobs, while the fault lasted
    num_started: int  #: processes, the fault's own restarts among them
    ended_themselves: dict[int, int]  #: by exit code, processes that no fault ended
    num_sick: int  #: processes that were restarted because they said that they are not healthy
    said: dict[str, int]  #: how often workers said so while the fault lasted, by what they said
    num_held: int  #: most messages that one worker held meanwhile
    num_waiting: int  #: most jobs that waited in one worker for a slot of its engine
    first_outcome_s: float | None  #: recorded, from the end of the fault; None: none was seen
    first_result_s: float | None  #: published, the same
    silence_s: float  #: longest time without a new result, from the beginning of the fault to the end of the phase
    caught_up_s: float | None  #: from the end of the fault until hardly any job waited; None: not in the time allowed
    backlog: int  #: jobs that waited at the end of the phase
    num_lost: int = 0  #: of the jobs that were sent in this phase
    num_twice: int = 0  #: of these, jobs with two outcomes, or counted twice


def run_phase(phase: Phase, world: World) -> PhaseReport:
    """Inject the faults of `phase`, each from a thread of its own, and see how the fleet comes back."""
    fleet, feeder, watcher = world.fleet, world.feeder, world.watcher
    began_s, num_sent, num_ended = watcher.now_s, feeder.num_sent, watcher.num_ended
    num_starts, ended_before = sum(member.num_starts for member in fleet.members), Counter(fleet.ended_themselves)
    num_sick = fleet.num_sick
    with ThreadPoolExecutor(len(phase.faults)) as threads:
        running = [
            threads.submit(FAULTS[name].inject, world, random.Random(f"{phase.seed} {name}"), phase.seconds)
            for name in phase.faults
        ]
        for fault in running:
            fault.result()
    healed_s = watcher.now_s
    num_sent_in_fault, num_ended_in_fault = feeder.num_sent - num_sent, watcher.num_ended - num_ended
    looks = [one for one in watcher.looks if one.fleet == fleet.name and began_s <= one.at_s <= healed_s]
    caught_up_s = _catch_up(world, healed_s)
    return PhaseReport(
        faults=phase.faults,
        fault_s=healed_s - began_s,
        num_sent=num_sent_in_fault,
        num_ended=num_ended_in_fault,
        num_started=sum(member.num_starts for member in fleet.members) - num_starts,
        ended_themselves=dict(fleet.ended_themselves - ended_before),
        num_sick=fleet.num_sick - num_sick,
        said=dict(Counter(one.said for one in looks)),
        num_held=max((one.num_held for one in looks), default=0),
        num_waiting=max((one.num_waiting for one in looks), default=0),
        first_outcome_s=first_growth_s(watcher.progress, healed_s),
        first_result_s=first_growth_s(watcher.published, healed_s),
        silence_s=longest_silence_s(watcher.published, began_s, watcher.now_s),
        caught_up_s=caught_up_s,
        backlog=world.backlog,
    )


def _catch_up(world: World, healed_s: float) -> float | None:
    watcher, most_waiting = world.watcher, _CAUGHT_UP_S * world.feeder.jobs_per_s
    while (after_s := watcher.now_s - healed_s) < world.size.catch_up_s:
        looked_s = watcher.progress[-1].at_s if watcher.progress else 0.0
        if looked_s > healed_s and world.backlog <= most_waiting:
            return after_s
        world.wait(_LOOK_S)
    return None
