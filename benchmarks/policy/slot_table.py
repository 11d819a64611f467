"""A device's true times by sequences and whole widths, for a play round by round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from alphaloop.costs import CostTable
from benchmarks.policy.rounds import Costs
from benchmarks.policy.scenario import Device
from benchmarks.policy.stream import Floats, Ints


class SlotTable:
    """The device's true times at whole widths, and at any speed."""

    def __init__(self, device: Device, most_sequences: int, draft_tokens: Mapping[str, int]) -> None:
        self.table: CostTable = device.table()
        self._costs = Costs.of(self.table, most_sequences, dict(draft_tokens))
        # Lists are read faster than arrays, one number at a time.
        self._passes: list[list[float]] = self._costs.passes.tolist()
        self._drafts: dict[str, list[list[float]]] = {d: grid.tolist() for d, grid in self._costs.drafts.items()}
        self._read: dict[tuple[str | None, int], float] = {}

    def pass_ms(self, num_running: int, mean_proposed: float) -> float:
        """The target's pass."""
        row = self._passes[num_running]
        below = min(int(mean_proposed), len(row) - 1)
        above = min(below + 1, len(row) - 1)
        return row[below] + (mean_proposed - below) * (row[above] - row[below])

    def passes_ms(self, num_running: Ints, mean_proposed: Floats) -> Floats:
        """`pass_ms` of many passes."""
        last = self._costs.passes.shape[1] - 1
        below = np.minimum(mean_proposed.astype(np.int64), last)
        above = np.minimum(below + 1, last)
        narrow, wide = self._costs.passes[num_running, below], self._costs.passes[num_running, above]
        return np.asarray(narrow + (mean_proposed - below) * (wide - narrow), dtype=np.float64)

    def drafts_ms(self, drafter: str, num_drafting: Ints, k: int) -> Floats:
        """`draft_ms` of many proposals."""
        return np.asarray(self._costs.drafts[drafter][num_drafting, k], dtype=np.float64)

    def draft_ms(self, drafter: str, num_drafting: int, k: int) -> float:
        """Proposing k tokens for so many sequences."""
        return self._drafts[drafter][num_drafting][k]

    def read_ms(self, part: str | None, num_tokens: int) -> float:
        """Reading a text."""
        key = part, num_tokens
        if key not in self._read:
            self._read[key] = self.table.prefill_ms(part, num_tokens)
        return self._read[key]
