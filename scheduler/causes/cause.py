"""The seven causes, and what is said about one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from alphaloop.measurements import DriftSubject
from scheduler.verdicts import ProbeVerdict, TrafficVerdict


class Cause(StrEnum):
    """Why acceptance moved: a word for SQL and metrics."""

    TRAFFIC_CHANGED = "traffic_changed"  #: other prompts; the draft is as good as before
    MIX_SHIFT = "mix_shift"  #: other shares of the segments; each segment is steady
    DRAFT_STALE = "draft_stale"  #: a new target, which the draft does not match
    BAD_DRAFT = "bad_draft"  #: a new draft, worse than its predecessor under the same target
    SETUP_CHANGED = "setup_changed"  #: another engine, engine version, dtype or setting
    FAULT = "fault"  #: the engine or its environment: nothing changed on record
    TOO_LITTLE_EVIDENCE = "too_little_evidence"


@dataclass(frozen=True, slots=True)
class Finding:
    """A move of acceptance with its cause; becomes a drift event while it lasts."""

    subject: DriftSubject
    cause: Cause
    sentence: str
    action: str  #: what the owner may do
    began_after: datetime | None  #: it began between these two moments
    began_before: datetime | None
    traffic: TrafficVerdict | None
    probes: ProbeVerdict | None  #: across the change
    left: ProbeVerdict | None  #: from before the change until the newest probes; None where only traffic moved


@dataclass(frozen=True, slots=True, order=True)
class Incident:
    """Something that must not happen, whatever acceptance is: an engine gave another text than it should have."""

    at: datetime
    task: str
    drafter: str  #: empty where vanilla decoding was wrong
    kind: str
