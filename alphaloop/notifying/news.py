"""What there is to tell, and how it is worded. Names, counts and sentences of the scheduler: no text of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from alphaloop.measurements import DriftSubject
from alphaloop.store.drift import EventState, PastState
from alphaloop.store.incidents import Incident

#: Changes of a report that its notification lists.
MAX_CHANGES: Final = 20


class NewsKind(StrEnum):
    """What a notification is about: a row of one table."""

    DRIFT = "drift"  #: of drift_event_states
    INCIDENT_OPENED = "incident_opened"  #: of incidents
    INCIDENT_CLOSED = "incident_closed"  #: of incidents
    REPORT = "report"  #: of reports


class Gravity(StrEnum):
    """How grave it is. The values are apprise's."""

    INFO = "info"
    SUCCESS = "success"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Message:
    """A notification as a person reads it."""

    title: str
    body: str
    gravity: Gravity


@dataclass(frozen=True, slots=True)
class News:
    """A notification with the row that it tells of."""

    kind: NewsKind
    source_id: int
    message: Message
    is_change: bool = True  #: False: a report that found everything as it was


def drift_news(state_id: int, subject: DriftSubject, state: PastState, action: str) -> News:
    """An event has a new state; `action` is what may be done now."""
    is_over = state.state is EventState.CLOSED
    cause = state.cause.replace("_", " ")
    title = f"alphaloop: {subject.task}, {subject.drafter}: drift {state.state.value} ({cause})"
    told = [state.sentence] if is_over else [state.sentence, action]
    body = "\n".join((*told, f"alphaloop drift show {state.event_id}"))
    return News(NewsKind.DRIFT, state_id, Message(title, body, Gravity.SUCCESS if is_over else Gravity.WARNING))


def incident_opened_news(incident_id: int, found: Incident) -> News:
    """An engine was proven wrong."""
    body = f"{found.sentence}\nEngine: {found.engine}. Results of the same engine and drafter may be wrong too."
    message = Message(f"alphaloop: {found.task}: incident opened ({_words(found)})", body, Gravity.FAILURE)
    return News(NewsKind.INCIDENT_OPENED, incident_id, message)


def incident_closed_news(incident_id: int, found: Incident) -> News:
    """Later probes were right."""
    title = f"alphaloop: {found.task}: incident closed ({_words(found)})"
    return News(
        NewsKind.INCIDENT_CLOSED, incident_id, Message(title, "Later probes of it were right.", Gravity.SUCCESS)
    )


def report_news(report_id: int, created_at: datetime, headline: str, changes: Sequence[str]) -> News:
    """A report was made."""
    lines = [headline, *(f"- {change}" for change in changes[:MAX_CHANGES])]
    if len(changes) > MAX_CHANGES:
        lines.append(f"and {len(changes) - MAX_CHANGES} more changes")
    title = f"alphaloop report, {created_at:%Y-%m-%d %H:%M} UTC"
    return News(NewsKind.REPORT, report_id, Message(title, "\n".join(lines), Gravity.INFO), is_change=bool(changes))


def _words(found: Incident) -> str:
    return found.kind.value.replace("_", " ")
