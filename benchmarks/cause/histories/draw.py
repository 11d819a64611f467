"""What one seed draws: a simulated task, its probe set, how far it falls; and the evidence that comes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.measurements import DriftSubject, ProbeResult
from benchmarks.cause.world import DRAFTER, MARGIN, Level, Segment, World, traffic
from scheduler.causes import DrafterEvidence, SeenIncident
from scheduler.drift.watching import TrafficVerdict
from scheduler.probe_history import ProbeHistory, ProbeSetup

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
