"""A device's true times by sequences and whole widths, for a play round by round."""

from __future__ import annotations

from collections.abc import Mapping

from alphaloop.cost import CostTable
from benchmarks.policy.rounds import Costs
from benchmarks.policy.scenario import Device


class SlotTable:
    """The device's true times at whole widths, and at any speed."""

    def __init__(self, device: Device, most_sequences: int, draft_tokens: Mapping[str, int]) -> None:
        self.table: CostTable = device.table()
        costs = Costs.of(self.table, most_sequences, dict(draft_tokens))
        self._passes: list[list[float]] = costs.passes.tolist()
        self._drafts: dict[str, list[list[float]]] = {name: grid.tolist() for name, grid in costs.drafts.items()}
        self._read: dict[tuple[str | None, int], float] = {}

    def pass_ms(self, num_running: int, mean_proposed: float) -> float:
        """The target's pass."""
        row = self._passes[num_running]
        below = min(int(mean_proposed), len(row) - 1)
        above = min(below + 1, len(row) - 1)
        return row[below] + (mean_proposed - below) * (row[above] - row[below])

    def draft_ms(self, drafter: str, num_drafting: int, k: int) -> float:
        """Proposing k tokens for so many sequences."""
        return self._drafts[drafter][num_drafting][k]

    def read_ms(self, part: str | None, num_tokens: int) -> float:
        """Reading a text."""
        key = part, num_tokens
        if key not in self._read:
            self._read[key] = self.table.prefill_ms(part, num_tokens)
        return self._read[key]
