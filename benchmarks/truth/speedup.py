"""The measured speed-up as screens show it, of short histories: a simulated device, its slices, the figure in words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from alphaloop.experiment.figures import SpeedupSubject, task_speedup
from alphaloop.experiment.observe import Phase, Slice
from benchmarks.switchback.world import NOTHING, TASK, Drafting, Host, Scenario, Truth, World, with_speedup
from benchmarks.truth.coverage import Coverage, Shown, coverage

_SUBJECT: Final = SpeedupSubject(TASK, "greedy", "target", "engine", "host", "device", "draft", "r1")
_NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)
_SLOW_MINUTES: Final = Host(slow_every_s=60)
#: A draft that is accepted more by some producers' texts than by others'.
_DRAFT: Final = Drafting(3, 0.7, 0.15, catch_up=(0.3, 0.05), producers=(0.55, 0.65, 0.7, 0.75, 0.85))
#: Control shares: the default, and one that shows a figure sooner.
SHARES: Final = (0.02, 0.2)


@dataclass(frozen=True, slots=True)
class Run:
    """What one history came to."""

    low: float | None
    high: float | None
    truth: Truth


def scenarios() -> list[Scenario]:
    """Vanilla against vanilla, and a known 1.2x, on a host with slow minutes."""
    return [
        Scenario("1.0x, slow minutes", NOTHING, _SLOW_MINUTES),
        Scenario("1.2x, slow minutes, producers", with_speedup(_DRAFT, 1.2), _SLOW_MINUTES),
    ]


def play(scenario: Scenario, num_jobs: int, control_share: float, seed: int) -> Run:
    """Decode so many jobs; the last ones leave slots empty."""
    world = World(scenario, seed)
    schedule = RoundSchedule(RoundDesign(control_share), random.Random(seed))
    slices: list[Slice] = []
    num_begun = 0
    while num_begun < num_jobs or world.running:
        room = min(scenario.num_slots, len(world.running) + num_jobs - num_begun)
        num_prompts = world.admit(room) if num_begun < num_jobs else 0
        num_begun += num_prompts
        arm = schedule.next_round({TASK: world.treatment})[TASK]
        slices += schedule.observe(world.round(speculates=arm is not None, num_prompts=num_prompts)[0])
    slices += schedule.close()
    if not any(one.phase is not Phase.CONTROL for one in slices):
        return Run(None, None, world.truth)
    speedup = task_speedup(_SUBJECT, slices, _NOW).speedup
    return Run(None, None, world.truth) if speedup is None else Run(speedup.low, speedup.high, world.truth)


def row(scenario: Scenario, num_jobs: int, control_share: float, runs: list[Run]) -> Coverage:
    """The truth is that of all runs together, because a single run has texts of its own."""
    truth = Truth()
    for run in runs:
        truth.add(run.truth)
    case = f"{scenario.name}, control {control_share:.0%}"
    return coverage("speed-up", case, num_jobs, (Shown(run.low, run.high, truth.speedup) for run in runs))
