"""Notifications: what they are about, how they are worded, and the services that carry them.

Names, counts and sentences of the scheduler: no text of a job. The only module that imports apprise, when it is used.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pydantic import SecretStr

from alphaloop import page
from alphaloop.errors import ConfigError, NotificationFailed, package_missing
from alphaloop.measurements import DriftSubject
from alphaloop.store.drift import EventState, Incident, PastState
from alphaloop.store.lacks import EndedBatch, Lack
from alphaloop.wording import counts, minute, one_line, sentence, words

if TYPE_CHECKING:
    from apprise.result import AppriseResult


#: Changes of a report that its notification lists.
MAX_CHANGES: Final = 20


class NewsKind(StrEnum):
    """What a notification is about: a row of one table."""

    DRIFT = "drift"  #: of drift_event_states
    INCIDENT_OPENED = "incident_opened"  #: of incidents
    INCIDENT_CLOSED = "incident_closed"  #: of incidents
    REPORT = "report"  #: of reports
    LACK_OPENED = "lack_opened"  #: of lacks
    LACK_CLOSED = "lack_closed"  #: of lacks
    BATCH_ENDED = "batch_ended"  #: of ended_batches


class Gravity(StrEnum):
    """How grave it is. The values are apprise's."""

    INFO = "info"
    SUCCESS = "success"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class NotificationText:
    """A notification as a person reads it."""

    title: str
    body: str
    gravity: Gravity


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification with the row that it is about."""

    kind: NewsKind
    source_id: int
    message: NotificationText
    is_change: bool = True  #: False: a report that found everything as it was, a batch whose requests all got a text


def drift_news(state_id: int, subject: DriftSubject, state: PastState, action: str) -> Notification:
    """An event has a new state; `action` is what may be done now."""
    is_over = state.state is EventState.CLOSED
    title = f"alphaloop: {subject.task}, {subject.drafter}: drift {state.state.value} ({words(state.cause)})"
    lines = [state.sentence] if is_over else [state.sentence, action]
    body = "\n".join((*lines, f"alphaloop drift show {state.event_id}"))
    return Notification(
        NewsKind.DRIFT, state_id, NotificationText(title, body, Gravity.SUCCESS if is_over else Gravity.WARNING)
    )


def incident_opened_news(incident_id: int, incident: Incident) -> Notification:
    """An engine was proven wrong."""
    body = f"{incident.sentence}\nEngine: {incident.engine}. Results of the same engine and drafter may be wrong too."
    message = NotificationText(
        f"alphaloop: {incident.task}: incident opened ({words(incident.kind)})", body, Gravity.FAILURE
    )
    return Notification(NewsKind.INCIDENT_OPENED, incident_id, message)


def incident_closed_news(incident_id: int, incident: Incident) -> Notification:
    """Later probes were right."""
    title = f"alphaloop: {incident.task}: incident closed ({words(incident.kind)})"
    return Notification(
        NewsKind.INCIDENT_CLOSED,
        incident_id,
        NotificationText(title, "Later probes of it were right.", Gravity.SUCCESS),
    )


def report_news(report_id: int, created_at: datetime, headline: str, changes: Sequence[str]) -> Notification:
    """A report was made."""
    lines = [headline, *(f"- {change}" for change in changes[:MAX_CHANGES])]
    if len(changes) > MAX_CHANGES:
        lines.append(f"and {len(changes) - MAX_CHANGES} more changes")
    title = f"alphaloop report, {created_at:%Y-%m-%d %H:%M} UTC"
    return Notification(
        NewsKind.REPORT, report_id, NotificationText(title, "\n".join(lines), Gravity.INFO), is_change=bool(changes)
    )


def lack_opened_news(lack_id: int, lack: Lack) -> Notification:
    """Deadlines will be missed, or twice as many as was said before."""
    title = f"alphaloop: {_shown(lack.target)}: too few workers for deadlines ({_segment(lack)})"
    body = f"{lack.sentence}\nalphaloop status"
    return Notification(NewsKind.LACK_OPENED, lack_id, NotificationText(title, body, Gravity.WARNING))


def lack_closed_news(lack_id: int, lack: Lack) -> Notification:
    """They will not any more, or none is due."""
    title = f"alphaloop: {_shown(lack.target)}: enough workers for deadlines ({_segment(lack)})"
    message = NotificationText(title, lack.closed_because or "", Gravity.SUCCESS)
    return Notification(NewsKind.LACK_CLOSED, lack_id, message)


def batch_ended_news(end_id: int, batch: EndedBatch) -> Notification:
    """A batch has ended: its requests by what became of them, when it was promised to end, and when it did."""
    ended = f"ended {minute(batch.ended_at.astimezone(UTC))}"
    lines = (sentence(f"{counts(batch.by_status)}; {ended}"), sentence(batch.promise_in_words()))
    body = "\n".join((*lines, f"alphaloop batch status {_shown(batch.batch_id)}"))
    gravity = Gravity.WARNING if batch.num_failed else Gravity.SUCCESS
    message = NotificationText(f"alphaloop: batch {_shown(batch.batch_id)} {batch.state}", body, gravity)
    return Notification(NewsKind.BATCH_ENDED, end_id, message, is_change=batch.num_failed > 0)


def _segment(lack: Lack) -> str:
    return f"segment {_shown(lack.segment)}" if lack.segment else "no segment"


def _shown(name: str) -> str:
    """A name that a caller gave, in one short line."""
    return one_line(name)[:_MAX_NAME_CHARS]


_MAX_NAME_CHARS: Final = 200
_LONGEST_S: Final = 30.0
_HTTP_STATUS: Final = re.compile(r"\berror=(\d{3})\b")


class Sink:
    """One address of one service, through apprise, which knows the services."""

    def __init__(self, url: SecretStr, setting: str) -> None:
        """`setting` is named where the address is none. Raises ConfigError, and ImportError without apprise."""
        from apprise import Apprise, AppriseAsset

        asset = AppriseAsset(app_id="alphaloop", app_desc="alphaloop", secure_logging=True, service_timeout=_LONGEST_S)
        service = Apprise.instantiate(url.get_secret_value(), asset=asset)
        if service is None:
            raise ConfigError(
                f"{setting}: expected an address that apprise knows, found another one (not shown, it may be secret)",
                hint="json://host:port/path, mailtos://user:password@host, slack://…: "
                + page("guides/notifications.md"),
            )
        self._apprise = Apprise(asset=asset)
        self._apprise.add(service)
        #: The service and a hash of the address: the same in every process, and no secret.
        self.name: Final = f"{service.service_name} {_fingerprint(url)}"

    def send(self, message: NotificationText) -> None:
        """Hand a message over, within a minute at most. Raises NotificationFailed."""
        from apprise import NotifyFormat, NotifyType

        try:
            result = self._apprise.notify(
                title=message.title,
                body=message.body,
                notify_type=NotifyType(message.gravity.value),
                body_format=NotifyFormat.TEXT,
            )
        except Exception as error:
            raise NotificationFailed(f"{self.name}: {type(error).__name__}") from None
        if not result:
            raise NotificationFailed(f"{self.name}: {_reason(result)}")


def open_sinks(urls: Sequence[SecretStr]) -> tuple[Sink, ...]:
    """A sink for each address, connected at its first message. Raises ConfigError for an address that is none."""
    # What they log may hold the path of an address, which is a secret of many services.
    logging.getLogger("apprise").propagate = False
    # A refusal's status is read from what apprise logs as a warning, also where a process logs errors alone.
    logging.getLogger("apprise").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.WARNING)
    try:
        return tuple(Sink(url, f"scheduler.notify_urls[{i}]") for i, url in enumerate(urls))
    except ImportError as error:
        raise package_missing(error, "scheduler.notify_urls") from None


def _reason(result: AppriseResult) -> str:
    """Why it failed: from apprise's log only the status of HTTP, since the rest may quote the address."""
    from apprise.result import AppriseResultStatus

    if result.status is AppriseResultStatus.TIMEOUT:
        return f"no answer within {_LONGEST_S:.0f} s"
    statuses = [match[1] for entry in result.logs() if (match := _HTTP_STATUS.search(entry.message))]
    return f"HTTP status {statuses[-1]}" if statuses else "refused, or not reachable"


def _fingerprint(url: SecretStr) -> str:
    """Tells two addresses apart. Slow to compute, so that a short password cannot be found by trying."""
    digest = hashlib.scrypt(url.get_secret_value().encode(), salt=b"alphaloop sink", n=2**14, r=8, p=1, dklen=4)
    return digest.hex()
