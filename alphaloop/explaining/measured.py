"""What was measured of a task: its speed-up by the switchback experiment, and how its last jobs were decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from alphaloop.deciding.decision import Reason
from alphaloop.store.traffic import WayDecoded
from alphaloop.switchback.expectation import ExpectationPair
from alphaloop.switchback.reliability import Reliability, by_drafter, reliability
from alphaloop.switchback.task_speedup import TaskSpeedup


@dataclass(frozen=True, slots=True)
class Sums:
    """Jobs of several ways together."""

    num_jobs: int = 0
    num_tokens: int = 0
    device_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a task: the one figure of its speed-up, and the last jobs like those that are asked about."""

    speedup: TaskSpeedup | None  #: None where no slice of the task was recorded in the last day
    ways: Sequence[WayDecoded]
    explored: Sums
    all: Sums
    expectations: Sequence[Reliability] = ()  #: of the task's drafters that were compared


def measured(
    speedup: TaskSpeedup | None, ways: Sequence[WayDecoded], pairs: Sequence[ExpectationPair] = ()
) -> Measured:
    """The figures of these ways, beside the measured speed-up and the reliability of earlier expectations."""
    explored = _together(w for w in ways if w.reason == Reason.EXPLORING)
    compared = [reliability(its) for its in by_drafter(pairs).values()]
    return Measured(speedup, ways, explored, _together(ways), compared)


def _together(ways: Iterable[WayDecoded]) -> Sums:
    found = list(ways)
    return Sums(**{field.name: sum(getattr(way, field.name) for way in found) for field in fields(Sums)})
