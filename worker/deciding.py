"""The decision for a batch, from what is remembered, what rounds cost, and the pure policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.belief import Belief
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.policy import Decision, decide
from alphaloop.deciding.posterior import PairBelief, believe
from alphaloop.settings import TaskSettings
from alphaloop.store.outcomes import Outcome
from worker.batching import BatchKey
from worker.choices import BatchKind, Budgets, Choices
from worker.circumstances import with_circumstances
from worker.costs import LiveCosts
from worker.engine import Engine, PreparedJob
from worker.question import evidence_key, question
from worker.remembered import Remembered

#: What all tasks say of a drafter moves slowly, and takes tens of milliseconds to add up.
_PAIR_LASTS: Final = timedelta(seconds=60)
#: Where nothing was added, only fading moves a belief.
_BELIEF_LASTS: Final = timedelta(seconds=60)
_MOST_BELIEFS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Believed:
    version: int
    at: datetime
    belief: Belief


class Decider:
    """Decides batches. The generator is the worker's own, seeded, so that a run can be repeated.

    Only the first batch of a task and sampling bucket, and a choice that changes, ask the database.
    """

    def __init__(
        self,
        engine: Engine,
        remembered: Remembered,
        choices: Choices,
        budgets: Budgets,
        *,
        costs: LiveCosts,
        limits: PolicyLimits,
        now: Callable[[], datetime],
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._remembered = remembered
        self._choices = choices
        self._budgets = budgets
        self._costs = costs
        self._limits = limits
        self._now = now
        self._rng = rng
        self._pairs: dict[str, tuple[datetime, PairBelief]] = {}
        self._beliefs: dict[EvidenceKey, _Believed] = {}

    def decide(self, key: BatchKey, jobs: Sequence[PreparedJob], task: TaskSettings) -> Decision:
        """Decide for a batch. Raises StoreError only before anything is changed, so it can be asked again."""
        now = self._now()
        drafters = self._drafters()
        wanted = evidence_key(key, jobs, self._engine.identity)
        kind = BatchKind(key.task, key.sampling_bucket, wanted.prompt_bucket, len(jobs))
        incumbent = self._choices.incumbent(kind)
        budget = self._budgets.of(key.task, key.sampling_bucket)
        lengths = self._remembered.lengths(key.task, ["", *(drafter.name for drafter in drafters)], now)
        controls = self._remembered.lengths(key.task, [""], now)
        context = question(key, jobs, task, lengths, control_jobs=controls.jobs, draw=self._rng.random())
        context = with_circumstances(context, self._engine, key, jobs, task, now)
        beliefs = {drafter.name: self._belief(wanted, drafter, now) for drafter in drafters}
        decision = decide(
            beliefs, drafters, self._costs.table, context, self._limits, incumbent=incumbent, budget=budget
        )  # fmt: skip
        if decision.budget is not None:
            self._budgets.keep(key.task, key.sampling_bucket, decision.budget)
        self._choices.keep(kind, decision)
        return decision

    def remember(self, outcomes: Iterable[Outcome]) -> None:
        """Outcomes of this worker's that were recorded count for its next decision."""
        for outcome in outcomes:
            self._remembered.add(outcome.evidence)
            for shadow in outcome.shadows:
                self._budgets.seen(shadow.key.task, shadow.key.sampling_bucket, [shadow.key.drafter])

    def _drafters(self) -> list[DrafterState]:
        return [
            replace(drafter, is_stale=self._remembered.is_stale(drafter.name, drafter.revision))
            for drafter in self._engine.drafters
        ]

    def _belief(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Belief:
        key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
        version = self._remembered.version(wanted.task, drafter.name)
        known = self._beliefs.get(key)
        if known is not None and known.version == version and now - known.at < _BELIEF_LASTS:
            return known.belief
        if len(self._beliefs) >= _MOST_BELIEFS:
            self._beliefs.clear()
        leaves = self._remembered.leaves(wanted.task, drafter.name, now)
        belief = believe(leaves, key, drafter.max_draft_tokens, self._pair(drafter, now))
        self._beliefs[key] = _Believed(version, now, belief)
        return belief

    def _pair(self, drafter: DrafterState, now: datetime) -> PairBelief:
        known = self._pairs.get(drafter.name)
        if known is not None and now - known[0] < _PAIR_LASTS:
            return known[1]
        tasks = self._remembered.of_tasks(drafter.name, now)
        pair = PairBelief.of(tasks, drafter.max_draft_tokens, self._limits.prior_alpha, self._limits.prior_spread)
        self._pairs[drafter.name] = (now, pair)
        return pair
