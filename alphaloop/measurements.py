"""What the measuring process reads back: jobs in the order they were decoded, and probes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """Jobs whose acceptance may be compared. Vanilla decoding has empty `drafter` and `draft_revision`.

    It is the key of all evidence without segment and prompt length: their mix is part of what traffic is, so a shift
    of the mix shows as changed traffic. Forms are kept apart, because constrained text is accepted on another level.
    """

    task: str
    target_revision: str
    engine: str
    sampling_bucket: str
    drafter: str = ""
    draft_revision: str = ""
    form_bucket: str = ""


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
class WatchedJob:
    """What the drift test reads of a job of traffic."""

    stream: Stream
    segment: str
    decoded_at: datetime
    ledger_id: int  #: order of jobs decoded in the same moment
    num_draft_tokens: int
    trials: tuple[int, ...]
    accepts: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was measured of a drafter on one prompt of a probe set."""

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
    is_scored: bool = False  #: on the text of a control; else decoded with the drafter


@dataclass(frozen=True, slots=True)
class AcceptedLevel:
    """An owner took the level of a drafter in a task for the norm, after it had changed."""

    at: datetime
    changed_before: datetime | None  #: the change was over by then; None: not known


@dataclass(frozen=True, slots=True, order=True)
class DriftSubject:
    """What a drift event is about."""

    task: str
    drafter: str
    draft_revision: str
    target_revision: str


@dataclass(frozen=True, slots=True, order=True)
class UnansweredAlarm:
    """A fall of a task's traffic that no probe has been decoded after."""

    raised_at: datetime
    subject: DriftSubject

    @property
    def what_waits(self) -> str:
        """What its drafter does not serve until then, in words."""
        return f"jobs until a probe of {self.subject.task} answers the alarm of {self.raised_at:%Y-%m-%d %H:%M} UTC"
