"""Histories in which other jobs come, or nothing happens."""

from __future__ import annotations

from benchmarks.cause.histories.draw import DAYS, Draw, evidence
from benchmarks.cause.world import Level, Segment, traffic
from scheduler.causes import DrafterEvidence


def nothing(draw: Draw) -> DrafterEvidence:
    """Steady jobs and steady probes."""
    world = draw.world()
    level = world.alpha(0)
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, level, 8, 9))


def other_jobs(draw: Draw) -> DrafterEvidence:
    """Harder jobs."""
    world = draw.world()
    level = world.alpha(0)
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, level - draw.fall(), 8.3, 9.5))


def easier_jobs(draw: Draw) -> DrafterEvidence:
    """Easier jobs."""
    world = draw.world()
    verdicts = draw.moved(world, 0.55, 0.55 + draw.fall(), 8.3, 9.5)
    return evidence(world, world.probes(DAYS, draw.prompts()), verdicts)


def other_jobs_of_a_segment(draw: Draw) -> DrafterEvidence:
    """Harder jobs of one of two segments."""
    world = draw.world()
    segments = [Segment("a", 0.7, 0.7, 200, 150), Segment("b", 0.75, 0.75 - draw.fall(), 200, 150)]
    return evidence(world, world.probes(DAYS, draw.prompts()), traffic(draw.rng, world, segments, 8.3, 9.5))


def other_jobs_after_a_fault_that_healed(draw: Draw) -> DrafterEvidence:
    """Harder jobs on day 8, after a fault from day 2 to 5."""
    world = draw.world()
    level = world.alpha(0)
    world.levels += [Level(2.5, level - draw.fall()), Level(5.5, level)]
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, level - draw.fall(), 8.3, 9.5))


def other_mix(draw: Draw) -> DrafterEvidence:
    """More jobs of the harder segment."""
    world = draw.world()
    segments = [Segment("hard", 0.5, 0.5, 80, 260), Segment("easy", 0.85, 0.85, 320, 120)]
    return evidence(world, world.probes(DAYS, draw.prompts()), traffic(draw.rng, world, segments, 8.3, 9.5))


def other_mix_of_thin_segments(draw: Draw) -> DrafterEvidence:
    """More jobs of five harder segments out of ten, with few jobs each."""
    world = draw.world()
    segments = [Segment(f"hard-{i}", 0.5, 0.5, 20, 60) for i in range(5)]
    segments += [Segment(f"easy-{i}", 0.85, 0.85, 80, 25) for i in range(5)]
    return evidence(world, world.probes(DAYS, draw.prompts()), traffic(draw.rng, world, segments, 8.3, 9.5))


def simpson_mix(draw: Draw) -> DrafterEvidence:
    """The mean falls while every segment rises a little."""
    world = draw.world()
    segments = [Segment("hard", 0.45, 0.47, 80, 300), Segment("easy", 0.85, 0.87, 320, 150)]
    return evidence(world, world.probes(DAYS, draw.prompts()), traffic(draw.rng, world, segments, 8.3, 9.5))


def simpson_jobs(draw: Draw) -> DrafterEvidence:
    """The same with steady probes."""
    world = draw.world()
    segments = [Segment("hard", 0.5, 0.3, 320, 150), Segment("easy", 0.85, 0.63, 80, 320)]
    return evidence(world, world.probes(DAYS, draw.prompts()), traffic(draw.rng, world, segments, 8.3, 9.5))
