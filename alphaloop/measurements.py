"""What the measuring process reads back: jobs in the order they were decoded, and probes beside their controls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """Jobs whose acceptance may be compared. Vanilla decoding has empty `drafter` and `draft_revision`.

    It is the key of all evidence without segment and prompt length: their mix is part of what traffic is, so a shift
    of the mix shows as changed traffic.
    """

    task: str
    target_revision: str
    engine: str
    sampling_bucket: str
    drafter: str = ""
    draft_revision: str = ""


@dataclass(frozen=True, slots=True)
class DecodedJob:
    """One job's counts by draft position (first position first), and what it cost."""

    decoded_at: datetime
    num_draft_tokens: int
    reason: str
    trials: tuple[int, ...]
    accepts: tuple[int, ...]
    num_tokens: int
    device_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One decoded probe with its vanilla twin on the same prompt, when that was decoded too."""

    scheduled_for: datetime
    task: str
    probe_set: str
    position: int
    prompt_id: str  #: the same in every version of the probe set that has this prompt
    drafter: str
    draft_revision: str
    target_revision: str
    engine: str
    num_draft_tokens: int
    trials: tuple[int, ...]
    accepts: tuple[int, ...]
    num_tokens: int
    device_s: float
    control_tokens: int | None = None
    control_device_s: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class DriftSubject:
    """What a drift event is about."""

    task: str
    drafter: str
    draft_revision: str
    target_revision: str
