"""Two ways to measure the same device: slices of rounds drawn at random, and whole batches decoded vanilla."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from alphaloop.acceptance import Z95
from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from alphaloop.experiment.estimate import Verdict, measured_speedup
from alphaloop.experiment.observe import Slice
from benchmarks.switchback.world import TASK, Scenario, Truth, World


@dataclass(frozen=True, slots=True)
class Found:
    """What one run concluded."""

    low: float  #: 0 and infinity where nothing was concluded
    ratio: float
    high: float
    verdict: str
    control_share: float  #: of the device's time, as it came out
    truth: Truth


def by_slices(scenario: Scenario, seed: int, design: RoundDesign, num_rounds: int) -> Found:
    """The switchback experiment."""
    world = World(scenario, seed)
    schedule = RoundSchedule(design, random.Random(seed))
    slices: list[Slice] = []
    control_s = 0.0
    for _ in range(num_rounds):
        num_prompts = world.admit()
        arm = schedule.next_round({TASK: world.treatment})[TASK]
        is_charged = schedule.is_charged
        facts, _ = world.round(speculates=arm is not None, num_prompts=num_prompts)
        control_s += facts.wall_s * is_charged
        slices += schedule.observe(facts)
    found = measured_speedup((*slices, *schedule.close()))
    speedup = found.speedup
    low, ratio, high = (speedup.low, speedup.mean, speedup.high) if speedup else (0.0, math.nan, math.inf)
    return Found(low, ratio, high, found.verdict, control_s / world.busy_s, world.truth)


def by_batches(scenario: Scenario, seed: int, design: RoundDesign, num_rounds: int) -> Found:
    """Batches decoded to their end, some of them vanilla. Jobs are the unit, whenever they ran.

    The chance of a batch is such that control takes the same share of the device's time.
    """
    world, rng = World(scenario, seed), random.Random(seed)
    share = design.control_share
    speedup = _usual_speedup(scenario)
    chance = share / (share + speedup * (1 - share))
    ended: dict[bool, list[JobCost]] = {False: [], True: []}
    control_s, is_control = 0.0, False
    for _ in range(num_rounds):
        num_prompts = 0
        if not world.running:
            num_prompts = world.admit()
            is_control = rng.random() < chance
        facts, texts = world.round(speculates=not is_control, num_prompts=num_prompts)
        ended[is_control] += [JobCost(text.num_tokens, text.device_s) for text in texts]
        control_s += facts.wall_s * is_control
    low, ratio, high = ratio_of_jobs(ended[False], ended[True])
    verdict = Verdict.FASTER if low > 1 else Verdict.SLOWER if high < 1 else Verdict.NO_VERDICT_YET
    return Found(low, ratio, high, verdict, control_s / world.busy_s, world.truth)


def _usual_speedup(scenario: Scenario) -> float:
    """About how much shorter a batch is with speculation."""
    world = World(scenario, seed=0)
    for _ in range(3000):
        world.round(speculates=True, num_prompts=world.admit())
    return world.truth.speedup


@dataclass(frozen=True, slots=True)
class JobCost:
    """What a job brought and took."""

    num_tokens: int
    device_s: float


def ratio_of_jobs(treated: Sequence[JobCost], controls: Sequence[JobCost]) -> tuple[float, float, float]:
    """Tokens a device second of the first over the second: ratio estimators, jobs independent (Cochran 1977, §6.4).

    Lower bound, ratio, upper bound: 0, not a number and infinity where a side has fewer than two jobs.
    """
    if min(len(treated), len(controls)) < 2:
        return 0.0, math.nan, math.inf
    rates, variance = [], 0.0
    for jobs in (treated, controls):
        tokens, device_s = sum(job.num_tokens for job in jobs), sum(job.device_s for job in jobs)
        rates.append(tokens / device_s)
        spread = sum((job.num_tokens / tokens - job.device_s / device_s) ** 2 for job in jobs)
        variance += spread * len(jobs) / (len(jobs) - 1)
    ratio, margin = rates[0] / rates[1], Z95 * math.sqrt(variance)
    return ratio * math.exp(-margin), ratio, ratio * math.exp(margin)
