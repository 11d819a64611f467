"""Exploration budgets in the database: one for all workers of a target and device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from alphaloop.deciding.evidence_source import Place
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.errors import StoreError
from alphaloop.store.budgets import BudgetStore, BudgetSubject
from alphaloop.store.history import HistoryStore
from worker.deciding.evidence_cache import EvidenceCache
from worker.engine import EngineIdentity

log = logging.getLogger(__name__)

#: Credit is written so often at most, because a write takes a fifth of a token's time.
ACCRUED_EVERY_S: Final = 60.0


class SharedBudgets:
    """A session's `BudgetStore`. One thread owns it.

    All workers of a target and device accrue and spend together, in the database, so a restart goes on with what there
    is. Spending is written at once, credit once a minute, and every write brings the changes of the others. Two workers
    that spend the same credit in between leave a negative balance, which has to be accrued before anybody spends again.
    How long each drafter was not used is read from history, so that re-checks of unused drafters come when they would
    have. A budget that cannot be written does not stop decoding: it is written with the next decision.
    """

    def __init__(
        self,
        store: BudgetStore,
        history: HistoryStore,
        evidence_cache: EvidenceCache,
        identity: EngineIdentity,
        drafters: Mapping[str, str],
        *,
        accrued_every_s: float = ACCRUED_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accrued_every_s, self._clock = accrued_every_s, clock
        self._store, self._history, self._evidence_cache = store, history, evidence_cache
        self._identity, self._drafters = identity, drafters
        self._stored: dict[tuple[str, str], ExplorationBudget] = {}
        self._due: dict[tuple[str, str], float] = {}

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The task's budget. May raise StoreError."""
        last_used = {
            name: self._evidence_cache.last_used(Place(task, name, revision))
            for name, revision in self._drafters.items()
        }
        unseen = {
            name: float(self._history.num_jobs_since(task, sampling_bucket, moment))
            for name, moment in last_used.items()
            if moment is not None
        }
        saved = self._store.read(self._subject(task, sampling_bucket))
        stored = self._stored[task, sampling_bucket] = saved or ExplorationBudget()
        # A budget that was stored has had its first credit.
        return replace(stored, unseen=unseen or None if saved is None else unseen)

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """The budget after a decision, with the changes of other workers if it was written."""
        has_spent = budget.spent != self._stored[task, sampling_bucket].spent
        if has_spent or self._clock() >= self._due.get((task, sampling_bucket), 0.0):
            return self.save(task, sampling_bucket, budget)
        return budget

    def save(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Write what changed since the last time."""
        subject = task, sampling_bucket
        stored = self._stored[subject]
        if _sums(budget) == _sums(stored):
            return budget
        try:
            budget = self._store.add(self._subject(*subject), stored, budget)
        except StoreError as error:
            log.warning("budget not stored: %s", error.message, extra={"action": "budget_not_stored"})
        else:
            self._stored[subject] = budget
            self._due[subject] = self._clock() + self._accrued_every_s
        return budget

    def _subject(self, task: str, sampling_bucket: str) -> BudgetSubject:
        return BudgetSubject(task, self._identity.target_revision, self._identity.device, sampling_bucket)


def _sums(budget: ExplorationBudget) -> tuple[float, float, float]:
    """What the database holds of a budget."""
    return budget.balance, budget.accrued, budget.spent
