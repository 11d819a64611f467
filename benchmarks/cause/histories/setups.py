"""Histories in which a target, a draft or an engine is changed."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cause.histories.draw import DAYS, FIRST, Draw, evidence
from benchmarks.cause.world import Level, World
from scheduler.causes import DrafterEvidence
from scheduler.probe_history import ProbeSetup


def harmless_changes(draw: Draw) -> DrafterEvidence:
    """A new target, and later a new engine, at the same level."""
    world = draw.world()
    world.setups += [(3.5, replace(FIRST, target_revision="target-2"))]
    world.setups += [(7.5, ProbeSetup("target-2", "draft-1", "engine-2"))]
    return evidence(world, world.probes(DAYS, draw.prompts()))


def new_target(draw: Draw) -> DrafterEvidence:
    """A new target that the draft does not match."""
    world = _unmatched_by_draft(draw)
    return evidence(world, world.probes(DAYS, draw.prompts()))


def new_target_and_registered_again(draw: Draw) -> DrafterEvidence:
    """The same, and later another version of the probe set."""
    world = _unmatched_by_draft(draw)
    first = world.probes(range(8), range(24), "set-1")
    return evidence(world, first + world.probes(range(8, 13), range(6, 30), "set-2"))


def registered_again_with_the_target(draw: Draw) -> DrafterEvidence:
    """The same, with the other version at once."""
    world = _unmatched_by_draft(draw)
    first = world.probes(range(6), range(32), "set-1")
    return evidence(world, first + world.probes(range(6, 13), range(8, 40), "set-2"))


def new_target_and_a_later_fault(draw: Draw) -> DrafterEvidence:
    """A new target on day 3 and a fault on day 9."""
    world = draw.world()
    level = world.alpha(0)
    world.levels += [Level(3.5, level - 0.2), Level(9.5, level - 0.42)]
    world.setups += [(3.5, replace(FIRST, target_revision="target-2"))]
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level - 0.2, level - 0.42, 9.5, 10.5))


def worse_draft(draw: Draw) -> DrafterEvidence:
    """A new draft, worse than the one that it was trained from."""
    world = draw.world()
    world.levels += [Level(6.5, world.alpha(0) - draw.fall())]
    world.setups += [(6.5, replace(FIRST, draft_revision="draft-2"))]
    return evidence(world, world.probes(DAYS, draw.prompts()), parents={"draft-2": "draft-1"})


def worse_draft_and_registered_again(draw: Draw) -> DrafterEvidence:
    """The same, with another version of the probe set at once."""
    world = draw.world()
    world.levels += [Level(6.5, world.alpha(0) - draw.fall())]
    world.setups += [(6.5, replace(FIRST, draft_revision="draft-2"))]
    return evidence(world, world.probes(range(7), range(32)) + world.probes(range(7, 13), range(8, 40), "set-2"))


def worse_draft_after_a_harmless_target(draw: Draw) -> DrafterEvidence:
    """A harmless new target on day 3, a worse draft on day 8."""
    world = draw.world()
    world.levels += [Level(8.5, world.alpha(0) - draw.fall())]
    world.setups += [
        (3.5, replace(FIRST, target_revision="target-2")),
        (8.5, ProbeSetup("target-2", "draft-2", "engine-1")),
    ]
    return evidence(world, world.probes(DAYS, draw.prompts()), parents={"draft-2": "draft-1"})


def new_engine(draw: Draw) -> DrafterEvidence:
    """Another engine, which jobs and probes show."""
    world = draw.world()
    world.levels += [Level(6.5, world.alpha(0) - draw.fall())]
    world.setups += [(6.5, replace(FIRST, engine="engine-2"))]
    level = world.alpha(0)
    return evidence(world, world.probes(DAYS, draw.prompts()), draw.moved(world, level, world.alpha(9), 6.5, 7.5))


def new_dtype(draw: Draw) -> DrafterEvidence:
    """Another dtype, with a smaller fall."""
    world = draw.world()
    world.levels += [Level(6.5, world.alpha(0) - draw.rng.uniform(0.1, 0.15))]
    world.setups += [(6.5, replace(FIRST, engine="engine-1-float16"))]
    return evidence(world, world.probes(DAYS, draw.prompts()))


def _unmatched_by_draft(draw: Draw) -> World:
    """A new target on day 5 that the draft does not match."""
    world = draw.world()
    world.levels += [Level(5.5, world.alpha(0) - draw.fall())]
    world.setups += [(5.5, replace(FIRST, target_revision="target-2"))]
    return world
