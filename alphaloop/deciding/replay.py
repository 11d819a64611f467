"""Replay: history is decided again under other rules, job by job. Pure; writes nothing.

Jobs come in the order in which they ended, and are decided with the evidence from before. A replay differs from a run
under the other rules in two ways: its evidence is what history decoded, not what the other rules would have decoded;
and jobs count as decided at the moment they ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from alphaloop.acceptance import EvidenceKey
from alphaloop.cost import CostTable
from alphaloop.deciding.budgets import BudgetsInMemory
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.incumbents import ChoicesInMemory
from alphaloop.deciding.job_facts import JobFacts, Subject, TaskRules
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posteriors import Posteriors
from alphaloop.deciding.session import DecisionSession
from alphaloop.messages import Decoding, Purpose

#: A worker adds up a drafter's tasks anew every minute. For days of history that would take minutes.
PAIR_LASTS: Final = timedelta(minutes=10)
#: Reasons that follow from the job or from the engine's state, which history does not record.
_GIVEN: Final = frozenset(
    {
        Reason.PROBE,
        Reason.SWITCHED_OFF,
        Reason.NO_MEMORY,
        Reason.FIRST_TOKENS,
        Reason.CANNOT_SERVE,
        Reason.UNDECIDED,
    }
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
    decode_batch_id: UUID | None = None  #: the same for jobs that were decided together; None: not recorded

    @property
    def engine(self) -> EngineName:
        """Where it was decoded."""
        return EngineName(self.device, self.key.engine, self.key.target_revision)

    @property
    def setting(self) -> DraftSetting:
        """What it was decoded with."""
        return DraftSetting(self.key.drafter or None, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of a configuration that decisions depend on. Tasks without rules have the defaults."""

    limits: PolicyLimits
    tasks: Mapping[str, TaskRules]

    def of(self, task: str) -> TaskRules:
        """The task's."""
        return self.tasks.get(task) or TaskRules()


class Replay:
    """The jobs of one engine, decided again under `rules`. `drafters` may be exchanged between two decisions."""

    def __init__(
        self,
        engine: EngineName,
        snapshot: EvidenceSnapshot,
        costs: CostTable,
        rules: Rules,
        *,
        was: Rules | None = None,
    ) -> None:
        """`was` are the rules of that time: they show whether a forced mode came from the task or from the job."""
        self.drafters: Sequence[DrafterState] = ()
        self.num_batches = 0
        self._rules, self._was = rules, was or rules
        self._session = DecisionSession(
            engine.target_revision,
            engine.engine,
            snapshot,
            posteriors=Posteriors(snapshot, rules.limits, pair_lasts=PAIR_LASTS),
            choices=ChoicesInMemory(),
            budgets=BudgetsInMemory(snapshot, lambda: self.drafters),
            costs=lambda: costs,
            drafters=lambda: self.drafters,
            limits=rules.limits,
            num_slots=0,
        )

    def decide(self, jobs: Sequence[PastJob]) -> tuple[Decision | None, ...]:
        """The rules' decision for each of `jobs`, which were decided together; None where the rules have no say.

        The jobs are of one task and sampling bucket.
        """
        free_jobs = [is_free(job, self._was) for job in jobs]
        free = [job for job, its in zip(jobs, free_jobs, strict=True) if its]
        if not free:
            return (None,) * len(jobs)
        task = free[0].key.task
        rules = self._rules.of(task)
        self.num_batches += 1
        decisions = iter(
            self._session.decide(
                Subject(task, free[0].key.sampling_bucket),
                [JobFacts(job.num_prompt_tokens, rules.max_tokens, job.key.segment) for job in free],
                rules,
                num_running=max(len(free), *(job.batch_size for job in free)),
                now=free[0].decoded_at,
            )
        )
        return tuple(next(decisions) if its else None for its in free_jobs)

    def scored(self, key: EvidenceKey) -> None:
        """A drafter was scored on texts that others decoded, so a change would have been seen."""
        self._session.count_scored([key])


def is_free(job: PastJob, was: Rules) -> bool:
    """Whether rules had a say in how the job was decoded; `was` are those of that time."""
    if job.purpose != Purpose.TRAFFIC or job.reason in _GIVEN:
        return False
    return job.reason != Reason.FORCED or was.of(job.key.task).decoding is not Decoding.AUTO
