"""Parts of a run's report: choices in force, probes sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alphaloop.probe_plan import ProbePlan


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """What a task's next job would do; else, with `running` None, how the task was decoded last."""

    mode: str
    drafter: str | None
    num_draft_tokens: int
    reason: str
    explanation: str
    running: int | None = None  #: the load at which the next job is decided: that of the last day


@dataclass(frozen=True, slots=True)
class SentProbes:
    """The probes that were due and those that were sent."""

    plan: ProbePlan = field(default_factory=ProbePlan)
    num_jobs_by_task: Mapping[str, int] = field(default_factory=dict)  #: probes and controls

    @property
    def num_jobs(self) -> int:
        """Probes and controls."""
        return sum(self.num_jobs_by_task.values())
