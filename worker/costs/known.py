"""The costs that a worker knows, whether it owns a device or sends jobs to servers."""

from __future__ import annotations

from typing import Protocol

from alphaloop.cost import CostTable
from alphaloop.cost_state import CostState
from worker.engine import Step


class KnownCosts(Protocol):
    """Costs that follow what steps take. One thread owns them; others may ask `level` and `read_s`."""

    @property
    def parts(self) -> tuple[str | None, ...]:
        """What is timed: None, the target, and the names of drafters."""

    @property
    def table(self) -> CostTable:
        """The costs as they are now, as far as `refresh` took in what was observed."""

    @property
    def state(self) -> CostState:
        """What `table` was made from when it was last asked for."""

    def level(self, part: str | None) -> float:
        """How much slower than first known the target or a drafter is now."""

    def read_s(self, num_tokens: int) -> float:
        """Seconds in which the target reads so many tokens of a prompt; 0 if not known."""

    def observe(self, step: Step) -> None:
        """Learn from what a step took."""

    def refresh(self) -> None:
        """Take in what was observed where that takes time; called when no job waits for a decision."""

    def save_when_due(self) -> bool:
        """Store what was learned if it is time and there is news; True if it was stored."""

    def save(self) -> bool:
        """Store what was learned if there is news."""
