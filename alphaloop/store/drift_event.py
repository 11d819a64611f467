"""What a drift event is, its states, and what a run does to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from alphaloop.errors import AlphaloopError
from alphaloop.measurements import DriftSubject


class EventState(StrEnum):
    """What became of an event. The values are those of `drift_event_states.state`."""

    OPENED = "opened"
    EXPLAINED = "explained"  #: a cause was found for it, or another one
    CONFIRMED = "confirmed"  #: later evidence agreed
    ACKNOWLEDGED = "acknowledged"  #: somebody took note of it
    CLOSED = "closed"  #: evidence showed that it was over
    REOPENED = "reopened"  #: it came back soon


class NoSuchEvent(AlphaloopError, LookupError):
    """No open drift event has this number."""

    code = "no_such_event"


@dataclass(frozen=True, slots=True)
class EventContent:
    """What a run says of an event."""

    subject: DriftSubject
    cause: str
    verdict: str
    action: str
    evidence: Mapping[str, Any]
    lost_tokens_per_s: float | None  #: None: not known
    began_after: datetime | None
    began_before: datetime | None


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A stored event."""

    id: int
    content: EventContent
    opened_at: datetime
    raised_at: datetime  #: opened or reopened
    confirmed_at: datetime | None
    acknowledged_at: datetime | None
    acknowledged_by: str | None
    note: str | None
    closed_at: datetime | None
    closed_because: str | None
    num_reopened: int
    accepted_at: datetime | None = None  #: when its owner took the new level for the norm

    @property
    def subject(self) -> DriftSubject:
        """What it is about."""
        return self.content.subject

    @property
    def cause(self) -> str:
        """Its cause as far as known."""
        return self.content.cause

    @property
    def state(self) -> EventState:
        """The last thing that became of it, as the view open_drift tells it."""
        if self.closed_at is not None:
            return EventState.CLOSED
        if self.acknowledged_at is not None:
            return EventState.ACKNOWLEDGED
        if self.confirmed_at is not None:
            return EventState.CONFIRMED
        return EventState.REOPENED if self.num_reopened else EventState.OPENED


@dataclass(frozen=True, slots=True)
class EventChange:
    """What a run does to an event: a new state with its sentence, or only newer content (`state` None)."""

    event_id: int | None  #: None: a new event
    state: EventState | None
    content: EventContent
    sentence: str


@dataclass(frozen=True, slots=True)
class PastState:
    """One row of an event's history."""

    event_id: int
    at: datetime
    state: EventState
    cause: str
    sentence: str
    actor: str
    evidence: Mapping[str, Any] | None
