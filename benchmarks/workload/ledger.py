"""A ledger in memory: what acceptance_state would hold after each group of jobs, for workers without a database."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import count

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.store.acceptance_state import FoldedKey, LedgerRow, StateRow, fold


class LedgerInMemory:
    """Evidence fades by `half_life`."""

    def __init__(self, half_life: timedelta) -> None:
        self._half_life = half_life
        self._ledger_ids = count(1)
        self._folded: dict[EvidenceKey, FoldedKey] = {}

    def record(self, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> list[StateRow]:
        """Add jobs that are recorded together; returns the rows that changed."""
        rows = [LedgerRow(next(self._ledger_ids), 0, key, evidence) for key, evidence in jobs]
        self._folded = fold(rows, self._half_life, self._folded)
        return [StateRow.of(key, self._folded[key]) for key in {row.key: None for row in rows}]
