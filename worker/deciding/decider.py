"""The worker's decisions: its jobs, its engine and its database, as a decision session takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from alphaloop.deciding.decision import ChoiceLog
from alphaloop.deciding.exploration import BudgetStore
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import PolicyLimits
from alphaloop.deciding.policy import Decision
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import Snapshot
from alphaloop.messages import Purpose
from alphaloop.settings import TaskSettings
from alphaloop.store.outcomes import Outcome
from worker.costs.known import KnownCosts
from worker.deciding.context import DecisionKey, conditions_of, facts_of, num_slots, subject_of
from worker.deciding.evidence_cache import EvidenceCache
from worker.engine import Engine, PreparedJob


class Decider:
    """Decides jobs that are admitted together.

    Only the first jobs of a task and sampling bucket read the database. A choice that changes is written there, and so
    is what is left of the task's budget.
    """

    def __init__(
        self,
        engine: Engine,
        evidence_cache: EvidenceCache,
        choices: ChoiceLog,
        budgets: BudgetStore,
        *,
        costs: KnownCosts,
        limits: PolicyLimits,
        now: Callable[[], datetime],
        note: Callable[[Snapshot], None] | None = None,
    ) -> None:
        self._engine = engine
        self._evidence_cache = evidence_cache
        self._now = now
        self.session = DecisionSession(
            engine.identity.target_revision,
            engine.identity.engine,
            evidence_cache,
            posteriors=Posteriors(evidence_cache, limits),
            choices=choices,
            budgets=budgets,
            costs=lambda: costs.table,
            drafters=self._drafters,
            limits=limits,
            num_slots=num_slots(engine),
            note=note,
        )

    def decide_each(
        self,
        key: DecisionKey,
        jobs: Sequence[PreparedJob],
        task: TaskSettings,
        *,
        num_running: int | None = None,
        decision_id: UUID | None = None,
    ) -> tuple[Decision, ...]:
        """A decision for each of `jobs`, in order: the same for all, or by groups that differ.

        `num_running` sequences will share a round with these jobs, these included; without it, these alone. A decision
        with a `decision_id` is recorded. Raises StoreError only before anything has changed: ask again.
        """
        num_running = len(jobs) if num_running is None else max(num_running, len(jobs))
        return self.session.decide(
            subject_of(key),
            [facts_of(job) for job in jobs],
            task.rules(),
            num_running=num_running,
            now=self._now(),
            conditions=conditions_of(self._engine, jobs, num_running),
            decision_id=decision_id,
        )

    def count_scored(self, outcomes: Iterable[Outcome]) -> None:
        """Count the drafters that were scored on this worker's traffic as used. Probes say nothing about its changes.

        The outcomes' evidence comes from the transaction that recorded them, see `EvidenceCache.take`.
        """
        traffic = (one for one in outcomes if one.run is not None and one.run.purpose == Purpose.TRAFFIC)
        self.session.count_scored(shadow.key for outcome in traffic for shadow in outcome.shadows)

    def save(self) -> None:
        """Write the budgets; before a worker ends."""
        self.session.save()

    def _drafters(self) -> list[DrafterState]:
        return [
            replace(drafter, is_stale=self._evidence_cache.is_stale(drafter.name, drafter.revision))
            for drafter in self._engine.drafters
        ]
