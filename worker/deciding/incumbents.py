"""What each kind of batch was last decoded with, and what its task may still lose to exploration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.errors import StoreError
from alphaloop.store.budgets import BudgetStore, BudgetSubject
from alphaloop.store.decisions import NOT_A_CHOICE, DecisionLog
from alphaloop.store.history import HistoryStore
from worker.deciding.evidence_cache import EvidenceCache
from worker.engine import EngineIdentity

log = logging.getLogger(__name__)

#: Kinds of batches kept in mind; beyond it all are forgotten, and the log says again what was chosen last.
_MOST_KINDS: Final = 50_000
#: What a task earned is written so often at most: a write takes a fifth of a token, and nobody waits for it.
ACCRUED_EVERY_S: Final = 60.0


class BatchKind(NamedTuple):
    """Batches among which a choice goes on until there is a reason to change it."""

    task: str
    sampling_bucket: str
    prompt_bucket: str
    batch: int


class Incumbents:
    """The incumbents. A new worker begins with the choice that the log names last for the task.

    A choice is logged when it, or its reason, is another than that of the last batch of its kind. A log that cannot be
    written is no reason not to decode: the change is logged with the next batch.
    """

    def __init__(self, changes: DecisionLog, identity: EngineIdentity, owner: str) -> None:
        self._changes = changes
        self._identity = identity
        self._owner = owner
        self._kept: dict[BatchKind, DraftSetting | None] = {}
        self._logged: dict[BatchKind, tuple[DraftSetting, str]] = {}
        self._begun_with: dict[tuple[str, str], DraftSetting | None] = {}

    def incumbent(self, kind: BatchKind) -> DraftSetting | None:
        """What batches of this kind are decoded with; None where nothing was ever chosen. May raise StoreError."""
        if kind in self._kept:
            return self._kept[kind]
        subject = kind.task, kind.sampling_bucket
        if subject not in self._begun_with:
            self._begun_with[subject] = self._changes.last_choice(
                kind.task, self._identity.target_revision, self._identity.device, kind.sampling_bucket
            )
        return self._begun_with[subject]

    def keep(self, kind: BatchKind, decision: Decision) -> None:
        """The decision was taken: it stays until there is a reason to change it, and is logged if it is a change."""
        if len(self._kept) > _MOST_KINDS:
            self._kept.clear()
            self._logged.clear()
        if decision.kept is not None:
            self._kept[kind] = decision.kept
        now = DraftSetting(decision.drafter, decision.num_draft_tokens), decision.reason.value
        if decision.reason in NOT_A_CHOICE or self._logged.get(kind) == now:
            return
        try:
            self._changes.record_change(
                kind.task,
                self._identity.target_revision,
                self._identity.device,
                kind.sampling_bucket,
                kind.batch,
                decision,
                self._owner,
            )
        except StoreError as error:
            log.warning("change of choice not logged: %s", error.message, extra={"action": "choice_not_logged"})
        else:
            self._logged[kind] = now


class Budgets:
    """What each task may still lose, by sampling bucket; one thread owns it.

    All workers of a target and device save up and spend together, in the database, so a restart goes on with what there
    is. What is spent is written at once, what is earned once a minute, and with it comes what the others did: two
    workers that spend the same in between owe it, and save it up before anybody spends again. How long each drafter has
    not been used is recalled from history, so that looks come as they would have. A budget that cannot be written is no
    reason not to decode: it is written with the next batch.
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
        self._due: dict[tuple[str, str], float] = {}
        self._store = store
        self._history = history
        self._evidence_cache = evidence_cache
        self._identity = identity
        self._drafters = drafters
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}
        self._stored: dict[tuple[str, str], ExplorationBudget] = {}

    def of(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The task's budget. The first time it is asked for, may raise StoreError."""
        subject = task, sampling_bucket
        if subject not in self._budgets:
            last_used = {name: self._evidence_cache.last_used(task, name) for name in self._drafters}
            unseen = {
                name: float(self._history.num_jobs_since(task, sampling_bucket, moment))
                for name, moment in last_used.items()
                if moment is not None
            }
            saved = self._store.read(self._subject(task, sampling_bucket))
            # Whoever has a budget has had its first credit.
            known = unseen or None if saved is None else unseen
            self._stored[subject] = saved or ExplorationBudget()
            self._budgets[subject] = replace(self._stored[subject], unseen=known)
        return self._budgets[subject]

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> None:
        """What is left of the task's budget, which was asked for."""
        subject = task, sampling_bucket
        self._budgets[subject] = budget
        has_spent = budget.spent != self._stored[subject].spent
        if has_spent or self._clock() >= self._due.get(subject, 0.0):
            self._write(subject)

    def save(self) -> None:
        """Write what was earned since the last time."""
        for subject in self._budgets:
            self._write(subject)

    def _write(self, subject: tuple[str, str]) -> None:
        budget, stored = self._budgets[subject], self._stored[subject]
        if replace(budget, unseen=None) == replace(stored, unseen=None):
            return
        try:
            budget = self._store.add(self._subject(*subject), stored, budget)
        except StoreError as error:
            log.warning("budget not stored: %s", error.message, extra={"action": "budget_not_stored"})
        else:
            self._budgets[subject] = self._stored[subject] = budget
            self._due[subject] = self._clock() + self._accrued_every_s

    def seen(self, task: str, sampling_bucket: str, drafter: str) -> None:
        """The drafter was scored on a job of the task without being used: a change would have been noticed."""
        subject = task, sampling_bucket
        if subject in self._budgets:
            self._budgets[subject] = self._budgets[subject].used(drafter)

    def _subject(self, task: str, sampling_bucket: str) -> BudgetSubject:
        return BudgetSubject(task, self._identity.target_revision, self._identity.device, sampling_bucket)
