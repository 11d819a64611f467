"""Everything that one decision was taken from, so that it can be taken again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol
from uuid import UUID

from alphaloop.cost import CostTable
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.evidence_source import JobLengths
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject, TaskRules
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.origins import PosteriorOrigin, SplitOrigin


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What all decisions of a session share, beside the drafters."""

    owner: str  #: the worker
    host: str
    device: str
    engine: str
    target_revision: str
    num_slots: int
    half_life: timedelta  #: of evidence
    limits: PolicyLimits


class SettingsOrigin(NamedTuple):
    """The earlier decision whose settings by running sequences were still up to date, and one of its jobs."""

    decision_id: UUID
    job_index: int


@dataclass(frozen=True, slots=True)
class DecisionInputs:
    """The inputs of one decision about `jobs`, beside the session's.

    Jobs form groups in the order of their first jobs (alphaloop/deciding/job_facts.py, `alike`).
    """

    decision_id: UUID
    subject: Subject
    jobs: tuple[JobFacts, ...]
    rules: TaskRules
    num_running: int
    now: datetime
    conditions: EngineConditions
    drafters: tuple[DrafterState, ...]
    costs: CostTable
    lengths: JobLengths
    splits: tuple[SplitOrigin, ...]  #: empty where the jobs are of one segment
    posteriors: tuple[tuple[PosteriorOrigin, ...], ...]  #: by group, then by drafter
    incumbent: DraftSetting | None
    budget: ExplorationBudget | None
    settings_from: tuple[SettingsOrigin | None, ...]  #: by group; None where the settings were computed anew, or none


class DecisionJournal(Protocol):
    """Where a session reports its decisions."""

    def note(self, inputs: DecisionInputs, decisions: Sequence[Decision]) -> None:
        """A decision that was just taken, one for each job. Must not wait and must not raise."""
