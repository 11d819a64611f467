"""The decision for a batch: memory and staleness from the store, costs from the calibration, then the pure policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.policy import Choice, Decision, DecisionContext, ExplorationBudget, decide
from alphaloop.deciding.posterior import believe_all
from alphaloop.messages import Decoding, Purpose
from alphaloop.settings import TaskSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.history import HistoryStore
from worker.batching import BatchKey
from worker.circumstances import with_circumstances
from worker.costs import LiveCosts
from worker.engine import Engine, PreparedJob


@dataclass(frozen=True, slots=True)
class Window:
    """How far back evidence counts, and how fast it fades."""

    days: float
    half_life_days: float


class Decider:
    """Decides batches. The generator is the worker's own, seeded, so that a run can be repeated."""

    def __init__(
        self,
        engine: Engine,
        state: AcceptanceStateStore,
        history: HistoryStore,
        drafts: DraftRegistry,
        changes: DecisionLog,
        *,
        costs: LiveCosts,
        limits: PolicyLimits,
        window: Window,
        owner: str,
        now: Callable[[], datetime],
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._state = state
        self._history = history
        self._drafts = drafts
        self._changes = changes
        self._costs = costs
        self._limits = limits
        self._window = window
        self._owner = owner
        self._now = now
        self._rng = rng
        self._kept: dict[tuple[str, str], Choice | None] = {}
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def decide(self, key: BatchKey, jobs: Sequence[PreparedJob], task: TaskSettings) -> Decision:
        """Decide for a batch of jobs of `task`."""
        identity = self._engine.identity
        drafters = self._drafters(identity.target_revision)
        now = self._now()
        half_life = timedelta(days=self._window.half_life_days)
        memories = {row.key: row.memory.faded(now, half_life) for row in self._state.of_task(key.task)}
        prompt_tokens = sum(len(job.token_ids) for job in jobs) / len(jobs)
        length = prompt_bucket(round(prompt_tokens))
        wanted = EvidenceKey(key.task, identity.target_revision, identity.engine, key.sampling_bucket, length)
        beliefs = believe_all(memories, wanted, drafters, self._limits)
        of_vanilla = replace(wanted, drafter="", draft_revision="")
        vanilla = [memory.all.jobs for found, memory in memories.items() if _is_same_engine(found, of_vanilla)]
        usual = self._history.expected_tokens(key.task, now=now, window_days=self._window.days)
        limit = sum(job.sampling.max_tokens for job in jobs) / len(jobs)
        asked = Decoding(key.decoding)
        context = DecisionContext(
            task=key.task,
            batch=len(jobs),
            expected_tokens=min(limit, usual) if usual is not None else limit,
            draw=self._rng.random(),
            purpose=Purpose(key.purpose),
            decoding=task.decoding if asked is Decoding.AUTO else asked,
            probe_drafter=key.probe_drafter or None,
            probe_num_draft_tokens=key.probe_num_draft_tokens or None,
            prompt_tokens=prompt_tokens,
            control_jobs=sum(vanilla),
        )
        context = with_circumstances(context, self._engine, key, jobs, task, now)
        subject = (key.task, key.sampling_bucket)
        decision = decide(
            beliefs, drafters, self._costs.table, context, self._limits,
            incumbent=self._kept.get(subject), budget=self._budgets.get(subject, ExplorationBudget()),
        )  # fmt: skip
        self._kept[subject] = decision.kept or self._kept.get(subject)
        if decision.budget is not None:
            self._budgets[subject] = decision.budget
        self._changes.record_change(
            key.task,
            identity.target_revision,
            identity.device,
            key.sampling_bucket,
            context.batch,
            decision,
            self._owner,
        )
        return decision

    def _drafters(self, target_revision: str) -> list[DrafterState]:
        stale = self._drafts.stale(target_revision)
        return [replace(d, is_stale=(d.name, d.revision) in stale) for d in self._engine.drafters]


def _is_same_engine(found: EvidenceKey, vanilla: EvidenceKey) -> bool:
    return (found.target_revision, found.engine, found.drafter) == (vanilla.target_revision, vanilla.engine, "")
