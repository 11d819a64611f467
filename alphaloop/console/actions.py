"""What those who signed in may do: each action is a form of a page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, urlencode

from starlette.requests import Request

from alphaloop.console.page import WrongRequest
from alphaloop.console.sessions import Session
from alphaloop.console.sources import Sources
from alphaloop.console.views import batches, letters
from alphaloop.kafka.producer import request_cancellation
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.incidents import IncidentStore

log = logging.getLogger(__name__)

Fields = Mapping[str, str]
#: Carries an action out, and returns the address of the page that shows what came of it.
Action = Callable[[Sources, Session, Request, Fields], str]
_MAX_NOTE_CHARS: Final = 2000


def acknowledge(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Take note of an open drift event, as `alphaloop drift ack` does. Raises NoSuchEvent."""
    event_id, (by, note) = request.path_params["event"], _acknowledgement(fields)
    DriftEventStore(sources.database).acknowledge(min(event_id, 2**63 - 1), by, note, datetime.now(UTC))
    _log(session, "drift_acknowledged", f"drift event {event_id}")
    return f"/drift/{event_id}"


def acknowledge_incident(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Take note of an open incident. Raises NoSuchIncident."""
    incident_id, (by, note) = request.path_params["incident"], _acknowledgement(fields)
    IncidentStore(sources.database).acknowledge(min(incident_id, 2**63 - 1), by, note, datetime.now(UTC))
    _log(session, "incident_acknowledged", f"incident {incident_id}")
    return "/drift"


def cancel(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Ask the workers to cancel a job, as `alphaloop cancel` does. Raises BrokerError."""
    job_id = fields.get("id", "")
    if not 0 < len(job_id) <= 200:
        raise WrongRequest("expected the id of a job")
    request_cancellation(sources.settings.kafka, [job_id])
    _log(session, "job_cancelled", f"job {job_id}")
    return f"/job?id={quote(job_id, safe='')}&asked=cancel"


def cancel_batch(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Ask the workers to cancel what has not ended of a batch, as `alphaloop batch cancel` does.

    Raises BrokerError, StoreError.
    """
    batch_id = fields.get("id", "")
    if not 0 < len(batch_id) <= 200:
        raise WrongRequest("expected the id of a batch")
    found = batches.open_jobs(sources, batch_id)
    request_cancellation(sources.settings.kafka, found)
    _log(session, "batch_cancelled", f"batch {batch_id}, {len(found)} jobs")
    return f"/batch?id={quote(batch_id, safe='')}&asked=cancel"


def redrive(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Send dead letters again, as `alphaloop dlq redrive` does. Raises WrongRequest, BrokerError, StoreError."""
    asked = {name: found for name in letters.FILTERS if (found := fields.get(name, "").strip())}
    done = letters.run(sources, asked, fields.get("set", ""), again=fields.get("again") == "1", dry_run=False)
    _log(session, "letters_redriven", f"{done.num_sent} dead letters")
    if "at" in asked:
        return f"/dead-letter?{urlencode({'at': asked['at']})}"
    shown = {name: found for name, found in asked.items() if name != "until"}
    return f"/dead-letters?{urlencode({**shown, 'sent': done.num_sent})}"


ACTIONS: Final[Mapping[str, Action]] = {
    "/drift/{event:int}/acknowledge": acknowledge,
    "/incidents/{incident:int}/acknowledge": acknowledge_incident,
    "/job/cancel": cancel,
    "/batch/cancel": cancel_batch,
    "/dead-letters/redrive": redrive,
}


def _acknowledgement(fields: Fields) -> tuple[str, str]:
    """Who takes note of something, and what they do about it. Raises WrongRequest."""
    by, note = fields.get("by", "").strip(), fields.get("note", "").strip()
    if not 0 < len(by) <= 200 or len(note) > _MAX_NOTE_CHARS:
        raise WrongRequest(f"expected a name of 1 to 200 characters and a note of at most {_MAX_NOTE_CHARS}")
    return by, note


def _log(session: Session, action: str, about: str) -> None:
    log.info("%s, by %s in the console", about, session.username, extra={"action": action})
