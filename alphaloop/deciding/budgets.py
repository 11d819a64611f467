"""Where exploration budgets are kept between decisions, by task and sampling bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.evidence_source import Place
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState


class BudgetStore(Protocol):
    """The budgets that a session opens and keeps."""

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The budget at the session's first decision. May raise StoreError."""

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Store the budget after a decision; returns it with what other sessions added or spent in between."""

    def save(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """As `keep`, at the end of the session: writes at once."""


class BudgetsInMemory:
    """Budgets for `replay` and the simulator. A drafter that the task's evidence knows counts as used just now."""

    def __init__(self, evidence: EvidenceSnapshot, drafters: Callable[[], Sequence[DrafterState]]) -> None:
        self._evidence, self._drafters = evidence, drafters
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The budget that was kept last, or a new one."""
        if (known := self._budgets.get((task, sampling_bucket))) is not None:
            return known
        used = [d.name for d in self._drafters() if self._evidence.knows(Place(task, d.name, d.revision))]
        return ExplorationBudget(unseen=dict.fromkeys(used, 0.0) or None)

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Store the budget; no other session spends from it."""
        self._budgets[task, sampling_bucket] = budget
        return budget

    def save(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """As `keep`."""
        return self.keep(task, sampling_bucket, budget)
