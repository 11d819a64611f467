"""Histories of which nobody could know the cause: no probes, too few, or two changes at once."""

from __future__ import annotations

from benchmarks.cause.histories.draw import DAYS, Draw, evidence
from benchmarks.cause.world import Level, World
from scheduler.causes import DrafterEvidence
from scheduler.probe_history import ProbeSetup


def change_after_the_last_probe(draw: Draw) -> DrafterEvidence:
    """Jobs fall after the last probe."""
    world = draw.world()
    level = world.alpha(0)
    return evidence(
        world, world.probes(range(10), draw.prompts()), draw.moved(world, level, level - draw.fall(), 9.4, 9.9)
    )


def no_probe_set(draw: Draw) -> DrafterEvidence:
    """Jobs of a task without probes fall, and another task's probes are steady."""
    world, other = draw.world(), draw.world("chat")
    level = world.alpha(0)
    verdicts = draw.moved(world, level, level - draw.fall(), 8.5, 9.5)
    return evidence(world, [], verdicts, elsewhere=[(other, other.probes(DAYS, draw.prompts()))])


def four_prompts_that_disagree(draw: Draw) -> DrafterEvidence:
    """.80 then, .59 now, over four prompts of which one has lost nearly everything."""
    world = World(draw.seed, levels=[Level(0.0, 0.8), Level(8.5, 0.7999)], dips={0: 0.7, 1: 0.1})
    return evidence(world, world.probes(DAYS, range(4)), draw.moved(world, 0.8, 0.8 - draw.fall(), 8.5, 9.5))


def target_and_engine_at_once(draw: Draw) -> DrafterEvidence:
    """A new target and another engine at once."""
    world = draw.world()
    world.levels += [Level(6.5, world.alpha(0) - draw.fall())]
    world.setups += [(6.5, ProbeSetup("target-2", "draft-1", "engine-2"))]
    return evidence(world, world.probes(DAYS, draw.prompts()))


def no_shared_prompt(draw: Draw) -> DrafterEvidence:
    """Another version of the probe set without a prompt of the first, while jobs fall."""
    world = draw.world()
    level = world.alpha(0)
    results = world.probes(range(9), range(16)) + world.probes(range(9, 13), range(16, 32), "set-2")
    return evidence(world, results, draw.moved(world, level, level - draw.fall(), 8.5, 9.5))
