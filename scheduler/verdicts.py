"""What the tests found out: the evidence from which a cause is named.

The test of traffic and the comparison of probes each give one verdict about a subject. Both know four states.
"Steady" is a finding: the interval of the change lies within a margin (equivalence). "No change was found" is not
enough for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from alphaloop.acceptance import Interval
from alphaloop.measurements import DriftSubject


class State(StrEnum):
    """What is known of a change of acceptance."""

    TOO_LITTLE = "too_little"  #: neither a change nor steadiness can be shown
    STEADY = "steady"  #: the interval of the change lies within the margin
    FELL = "fell"
    ROSE = "rose"


@dataclass(frozen=True, slots=True)
class TrafficVerdict:
    """What the jobs of a subject show. `segment` is empty for all of a task's segments together."""

    subject: DriftSubject
    segment: str
    state: State
    change: Interval | None  #: of α_1, estimated on jobs after the alarm; None without one
    changed_after: datetime | None  #: the change lies between these two moments; None without one
    changed_before: datetime | None
    num_jobs_before: int
    num_jobs_after: int
    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that decoded a probe and may change acceptance."""

    target_revision: str
    draft_revision: str
    engine: str  #: engine, its version, dtype and settings


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What the probes of a subject show, on prompts that both runs share."""

    subject: DriftSubject
    state: State
    change: Interval | None  #: of α_1, now less then
    num_prompts: int
    measured_before: datetime
    measured_after: datetime
    before: Setup
    after: Setup
    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int
