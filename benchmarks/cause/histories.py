"""Which histories are played, and the cause that is true of each.

"Too little evidence" is the truth only where no reader of the evidence could know better: no probes after the change,
no probe set, no shared prompt, two changes at once, or four prompts that disagree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.measurements import DriftSubject, ProbeResult
from benchmarks.cause.world import DRAFTER, MARGIN, Level, Segment, World, at, traffic
from scheduler.causes import Cause, DrafterEvidence, SeenIncident
from scheduler.drift.watching import TrafficVerdict
from scheduler.probe_history import ProbeHistory, ProbeSetup


@dataclass(frozen=True, slots=True)
class Scenario:
    """Evidence, and the causes that are true of it; none where nothing is wrong."""

    kind: str
    expected: frozenset[Cause]
    evidence: DrafterEvidence


def scenarios(kinds: Sequence[str], per_kind: int, first: int = 0) -> list[Scenario]:
    """`per_kind` draws of each kind, numbered from `first`; the same every time."""
    return [make(kind, first + number) for number in range(per_kind) for kind in kinds]


def make(kind: str, number: int) -> Scenario:
    """One draw of a kind."""
    expected, build = KINDS[kind]
    seed = f"{kind} {number}"
    return Scenario(kind, frozenset(expected), build(Draw(random.Random(seed), seed)))


FIRST: Final = ProbeSetup("target-1", "draft-1", "engine-1")
DAYS: Final = range(13)


@dataclass(slots=True)
class Draw:
    """What one seed chooses: sizes, days and levels."""

    rng: random.Random
    seed: str

    def world(self, task: str = "code") -> World:
        """A task at a level between .6 and .85."""
        return World(self.seed, task, levels=[Level(0.0, round(self.rng.uniform(0.6, 0.85), 3))])

    def prompts(self) -> list[int]:
        """A probe set of 16 to 40 prompts."""
        return list(range(self.rng.choice((16, 24, 32, 40))))

    def fall(self) -> float:
        """A fall that matters."""
        return self.rng.uniform(0.15, 0.35)

    def moved(self, world: World, before: float, after: float, day: float, seen: float) -> tuple[TrafficVerdict, ...]:
        """Traffic of one segment that moves."""
        return traffic(self.rng, world, [Segment("", before, after, 300, self.rng.randrange(80, 200))], day, seen)


def evidence(
    world: World,
    results: Sequence[ProbeResult],
    verdicts: tuple[TrafficVerdict, ...] = (),
    *,
    elsewhere: Sequence[tuple[World, Sequence[ProbeResult]]] = (),
    incidents: tuple[SeenIncident, ...] = (),
    parents: dict[str, str] | None = None,
) -> DrafterEvidence:
    """What the naming of causes is given. `elsewhere` are other tasks with their probes, `parents` drafts by draft."""
    setup = world.setup(99)
    return DrafterEvidence(
        DriftSubject(world.task, DRAFTER, setup.draft_revision, setup.target_revision),
        verdicts,
        ProbeHistory.of(world.task, DRAFTER, results, MARGIN, parents or {}),
        tuple(ProbeHistory.of(other.task, DRAFTER, found, MARGIN, {}) for other, found in elsewhere),
        incidents,
        MARGIN,
    )


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


_JOBS, _MIX, _STALE, _BAD = (
    (Cause.TRAFFIC_CHANGED,),
    (Cause.MIX_SHIFT,),
    (Cause.DRAFT_STALE,),
    (Cause.BAD_DRAFT,),
)
_SETUP, _FAULT, _THIN = (Cause.SETUP_CHANGED,), (Cause.FAULT,), (Cause.TOO_LITTLE_EVIDENCE,)
Kind = tuple[tuple[Cause, ...], Callable[[Draw], DrafterEvidence]]
#: By name; the kinds without a cause are the last ones.
KINDS: Final[dict[str, Kind]] = {
    "other jobs": (_JOBS, other_jobs),
    "easier jobs": (_JOBS, easier_jobs),
    "other jobs of a segment": (_JOBS, other_jobs_of_a_segment),
    "other jobs after a fault that healed": (_JOBS, other_jobs_after_a_fault_that_healed),
    "Simpson: every segment's jobs are harder": (_JOBS, simpson_jobs),
    "other mix": (_MIX, other_mix),
    "other mix of thin segments": (_MIX, other_mix_of_thin_segments),
    "Simpson: every segment rises": (_MIX, simpson_mix),
    "new target": (_STALE, new_target),
    "new target, probe set registered again": (_STALE, new_target_and_registered_again),
    "new target and probe set at once": (_STALE, registered_again_with_the_target),
    "new target, and a fault later": ((*_STALE, *_FAULT), new_target_and_a_later_fault),
    "worse draft": (_BAD, worse_draft),
    "worse draft and probe set at once": (_BAD, worse_draft_and_registered_again),
    "worse draft after a harmless target": (_BAD, worse_draft_after_a_harmless_target),
    "new engine": (_SETUP, new_engine),
    "new dtype": (_SETUP, new_dtype),
    "fault": (_FAULT, fault),
    "fault of .088": (_FAULT, small_fault),
    "fault after a harmless target": (_FAULT, harmless_target_and_a_later_fault),
    "fault that grows": (_FAULT, slow_fault),
    "fault after the last probe, then a probe": (_FAULT, fault_after_the_last_probe_and_one_at_once),
    "fault, probe set registered again": (_FAULT, fault_and_registered_again),
    "fault seen as an incident": (_FAULT, fault_seen_as_an_incident),
    "fault seen in other tasks": (_FAULT, fault_seen_in_other_tasks),
    "Simpson: every segment falls, and the probes": (_FAULT, simpson_fault),
    "change after the last probe": (_THIN, change_after_the_last_probe),
    "no probe set": (_THIN, no_probe_set),
    "four prompts that disagree": (_THIN, four_prompts_that_disagree),
    "target and engine at once": (_THIN, target_and_engine_at_once),
    "no shared prompt": (_THIN, no_shared_prompt),
    "nothing": ((), nothing),
    "harmless changes": ((), harmless_changes),
}
