"""Drift and incidents: what is open, what ended lately, and one event with its history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from starlette.requests import Request

from alphaloop.console.page import NotFound, Page
from alphaloop.console.sources import Sources
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.incidents import IncidentStore
from alphaloop.store.reports import ReportStore, StoredReport

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
            **_measured(ReportStore(sources.database).latest()),
        },
    )


def _measured(report: StoredReport | None) -> dict[str, str]:
    """What the absence of incidents and drift rests on: what the last run tested and compared."""
    if report is None:
        nothing = "Nothing was tested yet: no run of the scheduler has ended."
        return {"compared": nothing, "tested": nothing}
    at, content = f"{report.created_at:%Y-%m-%d %H:%M} UTC", report.content
    num_sets, num_tasks = content.get("num_probe_sets", 0), len(content.get("tasks", ()))
    num_pairs = content.get("exactness", {}).get("num_pairs", 0)
    pairs = f"{num_pairs:,} new pair{'' if num_pairs == 1 else 's'} of probe and control compared"
    tasks = f"{num_tasks:,} task{'' if num_tasks == 1 else 's'}"
    probed = (
        f"{num_sets:,} with a probe set" if num_sets else "none with a probe set, so a stale draft would not be told"
    )
    return {
        "compared": f"The run of {at} had {pairs}." if num_pairs else f"The run of {at} had no texts to compare.",
        "tested": f"The run of {at} tested the traffic of {tasks}, {probed}.",
    }


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
