"""Decides history again under other rules: what would have been chosen, job by job. Pure; writes nothing.

Jobs come in the order in which they ended, and every batch is asked about with what was known before it. Two things
cannot be otherwise, and whoever reads the result must know them: evidence is what history decoded, not what the other
rules would have decoded; and where nobody noted which jobs made up a batch, batches are put together again from jobs
that followed each other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from alphaloop.acceptance import EvidenceKey
from alphaloop.cost import CostTable
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot, Place
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.objective import Objective
from alphaloop.deciding.policy import decide
from alphaloop.messages import Decoding, Purpose

#: What was decided by the job or by the moment, and is not known of history beyond that.
_GIVEN: Final = frozenset(
    {Reason.PROBE, Reason.SWITCHED_OFF, Reason.NO_MEMORY, Reason.FIRST_TOKENS, Reason.CANNOT_SERVE}
)


class EngineName(NamedTuple):
    """Where a job was decoded."""

    device: str
    engine: str
    target_revision: str


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job that was decoded, and how."""

    key: EvidenceKey
    device: str
    purpose: str
    num_draft_tokens: int
    reason: str
    num_prompt_tokens: int
    num_tokens: int
    batch_size: int
    device_s: float
    decoded_at: datetime
    evidence: EvidenceSums
    is_evidence: bool
    decode_batch_id: UUID | None = None  #: None: nobody noted it

    @property
    def engine(self) -> EngineName:
        """Where it was decoded."""
        return EngineName(self.device, self.key.engine, self.key.target_revision)

    @property
    def choice(self) -> DraftSetting:
        """What it was decoded with."""
        return DraftSetting(self.key.drafter or None, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class TaskRules:
    """What a configuration says of a task."""

    max_tokens: float = 256.0
    decoding: Decoding = Decoding.AUTO
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True, slots=True)
class Rules:
    """A configuration, as far as decisions go. Tasks without rules have the defaults."""

    limits: PolicyLimits
    tasks: Mapping[str, TaskRules]

    def of(self, task: str) -> TaskRules:
        """The task's."""
        return self.tasks.get(task) or TaskRules()


class _Kind(NamedTuple):
    """Batches among which a choice goes on, as a worker keeps it."""

    task: str
    sampling_bucket: str
    prompt_bucket: str
    batch: int


@dataclass(slots=True)
class _Batch:
    decision: Decision
    left: int


class Replay:
    """One engine's jobs, decided again under `rules`. `drafters` may be exchanged while it goes on."""

    def __init__(
        self,
        snapshot: EvidenceSnapshot,
        costs: CostTable,
        rules: Rules,
        rng: random.Random,
        *,
        was: Rules | None = None,
    ) -> None:
        """`was` are the rules of then, which say what a forced mode came from: the task, or the job itself."""
        self.drafters: Sequence[DrafterState] = ()
        self.num_batches = 0
        self._snapshot = snapshot
        self._costs = costs
        self._rules = rules
        self._was = was or rules
        self._rng = rng
        self._open: dict[tuple[object, ...], _Batch] = {}
        self._noted: dict[UUID, Decision] = {}
        self._noted_at: datetime | None = None
        self._kept: dict[_Kind, DraftSetting | None] = {}
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def decide(self, job: PastJob) -> Decision | None:
        """What the rules choose for the batch of `job`; None where they have no say in it."""
        if job.purpose != Purpose.TRAFFIC or job.reason in _GIVEN:
            return None
        if job.reason == Reason.FORCED and self._was.of(job.key.task).decoding is Decoding.AUTO:
            return None
        if job.decode_batch_id is not None:
            return self._decide_noted(job.decode_batch_id, job)
        # Jobs of one batch were decoded alike, for one reason.
        group = (job.key.task, job.key.sampling_bucket, job.choice, job.reason, job.batch_size)
        batch = self._open.get(group)
        if batch is None or batch.left == 0:
            batch = self._open[group] = _Batch(self._decide(job), job.batch_size)
            self.num_batches += 1
        batch.left -= 1
        return batch.decision

    def _decide_noted(self, decode_batch_id: UUID, job: PastJob) -> Decision:
        if job.decoded_at != self._noted_at:
            # A batch's jobs are recorded as of one moment: those of earlier ones have all come.
            self._noted, self._noted_at = {}, job.decoded_at
        if decode_batch_id not in self._noted:
            self._noted[decode_batch_id] = self._decide(job)
            self.num_batches += 1
        return self._noted[decode_batch_id]

    def seen(self, key: EvidenceKey) -> None:
        """A drafter was scored without decoding: a change would have been noticed."""
        subject = key.task, key.sampling_bucket
        if subject in self._budgets:
            self._budgets[subject] = self._budgets[subject].used(key.drafter)

    def _decide(self, job: PastJob) -> Decision:
        key, at, task = job.key, job.decoded_at, self._rules.of(job.key.task)
        kind = _Kind(key.task, key.sampling_bucket, key.prompt_bucket, job.batch_size)
        wanted = replace(key, drafter="", draft_revision="")
        limits, subject = self._rules.limits, (key.task, key.sampling_bucket)
        posteriors = {d.name: self._snapshot.posterior(wanted, d, at, limits) for d in self.drafters}
        usual = self._snapshot.lengths(key.task, self.drafters, at)
        context = DecisionContext(
            task=key.task,
            batch=job.batch_size,
            expected_tokens=min(task.max_tokens, usual.output_tokens or task.max_tokens),
            draw=self._rng.random(),
            decoding=task.decoding,
            prompt_tokens=float(job.num_prompt_tokens),
            objective=task.objective,
            control_jobs=self._snapshot.lengths(key.task, (), at).jobs,
            known_output_jobs=usual.jobs,
        )
        decision = decide(
            posteriors,
            self.drafters,
            self._costs,
            context,
            limits,
            incumbent=self._kept.get(kind),
            budget=self._budget(subject),
        )
        if decision.kept is not None:
            self._kept[kind] = decision.kept
        if decision.budget is not None:
            self._budgets[subject] = decision.budget
        return decision

    def _budget(self, subject: tuple[str, str]) -> ExplorationBudget:
        if subject not in self._budgets:
            task = subject[0]
            used = [d.name for d in self.drafters if self._snapshot.knows(Place(task, d.name, d.revision))]
            self._budgets[subject] = ExplorationBudget(unseen=dict.fromkeys(used, 0.0) or None)
        return self._budgets[subject]
