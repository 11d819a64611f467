"""Drift and incidents: what is open, what ended lately, and one event with its history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from starlette.requests import Request

from alphaloop.console.page import NotFound, Page
from alphaloop.console.sources import Sources
from alphaloop.store.drift_events import DriftEventStore
from alphaloop.store.incidents import IncidentStore

#: Ended events and incidents that are still shown.
SHOWN_FOR: Final = timedelta(days=30)


def drift(sources: Sources, request: Request) -> Page:
    """Everything that is open, then what ended in the last days."""
    since = datetime.now(UTC) - SHOWN_FOR
    events, incidents = DriftEventStore(sources.database).since(since), IncidentStore(sources.database)
    return Page(
        "drift.html.j2",
        "Drift and incidents",
        {
            "open_events": [one for one in events if one.closed_at is None],
            "closed_events": [one for one in reversed(events) if one.closed_at is not None],
            "open_incidents": incidents.open_incidents(),
            "closed_incidents": incidents.closed_since(since)[::-1],
            "days": SHOWN_FOR.days,
        },
    )


def drift_event(sources: Sources, request: Request) -> Page:
    """The event whose number the address names. Raises NotFound."""
    store = DriftEventStore(sources.database)
    number = request.path_params["event"]
    event = store.find(number) if number < 2**63 else None
    if event is None:
        raise NotFound(f"no drift event {number}")
    return Page(
        "drift_event.html.j2",
        f"Drift {event.id}",
        {"event": event, "state": event.state, "history": store.history(event.id)},
    )
