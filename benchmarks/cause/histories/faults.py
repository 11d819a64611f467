"""Histories with a fault: acceptance falls, and nothing was changed that explains it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cause.histories.draw import DAYS, FIRST, Draw, evidence
from benchmarks.cause.world import DRAFTER, Level, Segment, at, traffic
from scheduler.causes import DrafterEvidence, SeenIncident


def fault(draw: Draw) -> DrafterEvidence:
    """Jobs and probes fall, nothing changed."""
    world = draw.world()
    level = world.alpha(0)
    world.levels += [Level(8.5, level - draw.fall())]
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, world.alpha(9), 8.5, 9.5))


def small_fault(draw: Draw) -> DrafterEvidence:
    """The review's fall of .088, which was told as steady."""
    world = draw.world()
    level = world.alpha(0)
    world.levels += [Level(8.5, level - 0.088)]
    return evidence(world, world.probes(DAYS, range(40)), draw.moved(world, level, level - 0.088, 8.5, 9.5))


def simpson_fault(draw: Draw) -> DrafterEvidence:
    """Every segment falls while the mean stays, because easy jobs come instead of hard ones; so do the probes."""
    world = draw.world()
    world.levels += [Level(8.3, world.alpha(0) - 0.2)]
    segments = [Segment("hard", 0.5, 0.3, 320, 150), Segment("easy", 0.85, 0.63, 80, 320)]
    return evidence(world, world.probes(DAYS, draw.prompts()), traffic(draw.rng, world, segments, 8.3, 9.5))


def harmless_target_and_a_later_fault(draw: Draw) -> DrafterEvidence:
    """A harmless new target on day 3, a fault on day 9."""
    world = draw.world()
    level = world.alpha(0)
    world.setups += [(3.0, replace(FIRST, target_revision="target-2"))]
    world.levels += [Level(8.9, level - draw.fall())]
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, world.alpha(9), 8.9, 9.9))


def slow_fault(draw: Draw) -> DrafterEvidence:
    """A fault that grows over five days."""
    world = draw.world()
    level, fall = world.alpha(0), draw.fall()
    world.levels += [Level(5 + step * 0.5, level - fall * step / 10) for step in range(1, 11)]
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, level - fall, 8.5, 9.5))


def fault_after_the_last_probe_and_one_at_once(draw: Draw) -> DrafterEvidence:
    """A fault after the daily probe, and a probe because of the alarm."""
    world = draw.world()
    level = world.alpha(0)
    world.levels += [Level(9.3, level - draw.fall())]
    results = world.probes([*range(10), 9.8], draw.prompts())
    return evidence(world, results, draw.moved(world, level, world.alpha(9.5), 9.3, 9.7))


def fault_and_registered_again(draw: Draw) -> DrafterEvidence:
    """A fault, and later another version of the probe set."""
    world = draw.world()
    world.levels += [Level(6.5, world.alpha(0) - draw.fall())]
    return evidence(world, world.probes(range(9), range(32)) + world.probes(range(9, 13), range(8, 40), "set-2"))


def fault_seen_as_an_incident(draw: Draw) -> DrafterEvidence:
    """Jobs fall after the last probe, and the engine was seen to err."""
    world = draw.world()
    level = world.alpha(0)
    verdicts = draw.moved(world, level, level - draw.fall(), 9.3, 9.8)
    seen = (SeenIncident(at(9.6), "code", DRAFTER, "wrong_text"),)
    return evidence(world, world.probes(range(10), draw.prompts()), verdicts, incidents=seen)


def fault_seen_in_other_tasks(draw: Draw) -> DrafterEvidence:
    """Jobs of a task without probes fall, and the probes of another one."""
    world, other = draw.world(), draw.world("chat")
    level, fall = world.alpha(0), draw.fall()
    other.levels += [Level(8.5, other.alpha(0) - fall)]
    verdicts = draw.moved(world, level, level - fall, 8.5, 9.5)
    return evidence(world, [], verdicts, elsewhere=[(other, other.probes(DAYS, draw.prompts()))])
