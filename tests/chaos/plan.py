"""The plan of a run: which faults, when, and with which seeds. The same seed and size give the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.faults import FAULTS
from tests.chaos.size import Size

#: Faults of the part with the real engine, whose workers need long to start.
_REAL_FAULTS = ("workers killed", "workers suspended", "broker lost", "Postgres bounced", "connections cut")
#: What two cores need to start one worker.
_RESTART_S = 0.9
#: Between the end of a fault and the next one the fleet is given about so long.
_BETWEEN_S = 8.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a run: these faults at the same time, each with a seed of its own."""

    faults: tuple[str, ...]
    seed: int
    seconds: float

    @property
    def name(self) -> str:
        """For the report."""
        return " + ".join(self.faults)


@dataclass(frozen=True, slots=True)
class Plan:
    """All phases, those with the real engine first."""

    seed: int
    size: Size
    real: tuple[Phase, ...]
    null: tuple[Phase, ...]


def draw_plan(seed: int, size: Size) -> Plan:
    """The phases of the size, in a drawn order if it has none, then pairs of faults that hit different things."""
    rng = random.Random(seed)
    order = size.phases if size.is_ordered else rng.sample(size.phases, len(size.phases))
    known = tuple(name for names in size.phases for name in names)
    null = [*order, *(_pair(rng, known) for _ in range(size.num_pairs))]
    names = rng.sample(_REAL_FAULTS, len(_REAL_FAULTS)) if size.num_real_jobs else []
    real: list[tuple[str, ...]] = [(name,) for name in names]
    return Plan(seed, size, _phases(rng, real, size, 0.5), _phases(rng, null, size, 1.0))


def sending_s(phases: Sequence[Phase]) -> float:
    """How long the jobs of these phases are being sent."""
    return sum(phase.seconds + _BETWEEN_S for phase in phases)


def _pair(rng: random.Random, names: tuple[str, ...]) -> tuple[str, ...]:
    """Two faults that hit different things; one where all of `names` hit the same."""
    first = rng.choice(names)
    others = [name for name in names if FAULTS[name].target is not FAULTS[first].target]
    return (first, rng.choice(others)) if others else (first,)


def _phases(rng: random.Random, faults: list[tuple[str, ...]], size: Size, times: float) -> tuple[Phase, ...]:
    storm_s = _RESTART_S * size.num_workers * size.num_storm_restarts
    return tuple(
        Phase(names, rng.getrandbits(32), max(times * size.fault_s, storm_s if "rebalance storm" in names else 0.0))
        for names in faults
    )
