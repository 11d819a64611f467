"""The decision for a batch, from what is remembered, what rounds cost, and the pure policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.groups import Group, decide_groups
from alphaloop.deciding.inference import PairPosterior, infer, splits_by_segment
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.policy import Decision
from alphaloop.deciding.posterior import Posterior
from alphaloop.settings import TaskSettings
from alphaloop.store.outcomes import Outcome
from worker.costs.live import LiveCosts
from worker.deciding.conditions import with_conditions
from worker.deciding.context import alike, evidence_key, question
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.incumbents import BatchKind, Budgets, Incumbents
from worker.engine import Engine, PreparedJob
from worker.jobs.lanes import LaneKey

#: What all tasks say of a drafter moves slowly, and takes tens of milliseconds to add up.
_PAIR_LASTS: Final = timedelta(seconds=60)
#: Where nothing was added, only fading moves a belief.
_POSTERIOR_LASTS: Final = timedelta(seconds=60)
_MOST_POSTERIORS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _CachedPosterior:
    version: int
    at: datetime
    posterior: Posterior


class Decider:
    """Decides batches. The generator is the worker's own, seeded, so that a run can be repeated.

    Only the first batch of a task and sampling bucket asks the database. A choice that changes is written there, and so
    is what is left of the task's budget.
    """

    def __init__(
        self,
        engine: Engine,
        evidence_cache: EvidenceCache,
        incumbents: Incumbents,
        budgets: Budgets,
        *,
        costs: LiveCosts,
        limits: PolicyLimits,
        now: Callable[[], datetime],
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._evidence_cache = evidence_cache
        self._incumbents = incumbents
        self._budgets = budgets
        self._costs = costs
        self._limits = limits
        self._now = now
        self._rng = rng
        self._pairs: dict[str, tuple[datetime, PairPosterior]] = {}
        self._posteriors: dict[EvidenceKey, _CachedPosterior] = {}
        self._splits: dict[tuple[str, str], tuple[int, bool]] = {}

    def decide_each(
        self, key: LaneKey, jobs: Sequence[PreparedJob], task: TaskSettings, *, num_running: int | None = None
    ) -> tuple[Decision, ...]:
        """A decision for each job of a batch, in order: the same for all, or by groups that differ.

        Raises StoreError only before anything is changed: ask again.
        """
        segments = {job.job.segment for job in jobs}
        groups = alike(jobs, by_segment=len(segments) > 1 and self._splits_by_segment(key.task))
        by_job = {
            index: decision
            for group, decision in zip(groups, self._decide(key, jobs, task, groups), strict=True)
            for index in group
        }
        return tuple(by_job[index] for index in range(len(jobs)))

    def _decide(
        self, key: LaneKey, jobs: Sequence[PreparedJob], task: TaskSettings, groups: Sequence[Sequence[int]]
    ) -> tuple[Decision, ...]:
        now, drafters = self._now(), self._drafters()
        wanted = [evidence_key(key, [jobs[index] for index in group], self._engine.identity) for group in groups]
        most = max(range(len(groups)), key=lambda number: len(groups[number]))
        kind = BatchKind(key.task, key.sampling_bucket, wanted[most].prompt_bucket, len(jobs))
        incumbent = self._incumbents.incumbent(kind)
        budget = self._budgets.of(key.task, key.sampling_bucket)
        lengths = self._evidence_cache.lengths(key.task, ["", *(drafter.name for drafter in drafters)], now)
        controls = self._evidence_cache.lengths(key.task, [""], now)
        context = question(key, jobs, task, lengths, control_jobs=controls.jobs, draw=self._rng.random())
        context = replace(with_conditions(context, self._engine, key, jobs, task, now), now=now)
        inferred = [
            Group(len(group), {drafter.name: self._posterior(one, drafter, now) for drafter in drafters})
            for group, one in zip(groups, wanted, strict=True)
        ]
        decisions = decide_groups(
            inferred, drafters, self._costs.table, context, self._limits, incumbent=incumbent, budget=budget
        )
        if (left := decisions[most].budget) is not None:
            self._budgets.keep(key.task, key.sampling_bucket, left)
        self._incumbents.keep(kind, decisions[most])
        return decisions

    def remember(self, outcomes: Iterable[Outcome]) -> None:
        """Outcomes of this worker's that were recorded count for its next decision."""
        recorded = list(outcomes)
        self._evidence_cache.add(one for outcome in recorded for one in outcome.evidence)
        for shadow in (shadow for outcome in recorded for shadow in outcome.shadows):
            self._budgets.seen(shadow.key.task, shadow.key.sampling_bucket, shadow.key.drafter)

    def save(self) -> None:
        """Write what tasks earned since the last time; before a worker ends."""
        self._budgets.save()

    def _drafters(self) -> list[DrafterState]:
        return [
            replace(drafter, is_stale=self._evidence_cache.is_stale(drafter.name, drafter.revision))
            for drafter in self._engine.drafters
        ]

    def _splits_by_segment(self, task: str) -> bool:
        now = self._now()
        for drafter in self._engine.drafters:
            version = self._evidence_cache.version(task, drafter.name)
            known = self._splits.get((task, drafter.name))
            if known is None or known[0] != version:
                leaves = self._evidence_cache.leaves(task, drafter.name, now)
                known = version, splits_by_segment(leaves)
                self._splits[task, drafter.name] = known
            if known[1]:
                return True
        return False

    def _posterior(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Posterior:
        key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
        version = self._evidence_cache.version(wanted.task, drafter.name)
        known = self._posteriors.get(key)
        if known is not None and known.version == version and now - known.at < _POSTERIOR_LASTS:
            return known.posterior
        if len(self._posteriors) >= _MOST_POSTERIORS:
            self._posteriors.clear()
        leaves = self._evidence_cache.leaves(wanted.task, drafter.name, now)
        posterior = infer(leaves, key, drafter.max_draft_tokens, self._pair(drafter, now))
        self._posteriors[key] = _CachedPosterior(version, now, posterior)
        return posterior

    def _pair(self, drafter: DrafterState, now: datetime) -> PairPosterior:
        known = self._pairs.get(drafter.name)
        if known is not None and now - known[0] < _PAIR_LASTS:
            return known[1]
        pair = PairPosterior.of_drafter(drafter, self._limits, self._evidence_cache.of_tasks(drafter.name, now))
        self._pairs[drafter.name] = (now, pair)
        return pair
