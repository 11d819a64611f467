"""What the scheduler found: drift and incidents, the drafts and whether each is fit to serve, and its reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from alphaloop.console.page import Page, as_json, moment, wants_json
from alphaloop.console.reading import Sources
from alphaloop.errors import UnknownName
from alphaloop.explaining.refreshing import refresh_lines
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.drift import DriftEventStore, IncidentStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.wording import how_many, minute

#: Ended events and incidents that are still shown.
_SHOWN_FOR: Final = timedelta(days=30)
_PAGE_SIZE: Final = 50
#: A report is a page of its own, with its style inside and no script.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"


def drift(sources: Sources, request: Request) -> Page:
    """Everything that is open, then what ended in the last days."""
    since = datetime.now(UTC) - _SHOWN_FOR
    events, incidents = DriftEventStore(sources.database).since(since), IncidentStore(sources.database)
    return Page(
        "drift.html.j2",
        "Drift and incidents",
        {
            "open_events": [event for event in events if event.closed_at is None],
            "closed_events": [event for event in reversed(events) if event.closed_at is not None],
            "open_incidents": incidents.open_incidents(),
            "closed_incidents": incidents.closed_since(since)[::-1],
            "days": _SHOWN_FOR.days,
            **_measured(ReportStore(sources.database).latest()),
        },
    )


def _measured(report: StoredReport | None) -> dict[str, str]:
    """What the absence of incidents and drift rests on: what the last run tested and compared."""
    if report is None:
        nothing = "Nothing was tested yet: no run of the scheduler has ended."
        return {"compared": nothing, "tested": nothing}
    at, content = minute(report.created_at), report.content
    num_sets, num_tasks = content.get("num_probe_sets", 0), len(content.get("tasks", ()))
    num_pairs = content.get("exactness", {}).get("num_pairs", 0)
    pairs, tasks = f"{how_many(num_pairs, 'new pair')} of probe and control compared", how_many(num_tasks, "task")
    probed = (
        f"{num_sets:,} with a probe set" if num_sets else "none with a probe set, so a stale draft would not be noticed"
    )
    return {
        "compared": f"The run of {at} had {pairs}." if num_pairs else f"The run of {at} had no texts to compare.",
        "tested": f"The run of {at} tested the traffic of {tasks}, {probed}.",
    }


def drift_event(sources: Sources, request: Request) -> Page:
    """The event whose number the address names. Raises UnknownName."""
    store = DriftEventStore(sources.database)
    number = request.path_params["event"]
    event = store.find(number) if number < 2**63 else None
    if event is None:
        raise UnknownName(f"no drift event {number}")
    return Page(
        "drift_event.html.j2",
        f"Drift {event.id}",
        {"event": event, "state": event.state, "history": store.history(event.id)},
    )


def reports(sources: Sources, request: Request) -> Page:
    """A page of reports, the newest first, made before `before`."""
    before = moment(request, "before")
    headings = ReportStore(sources.database).headings(_PAGE_SIZE + 1, before=before)
    shown = headings[:_PAGE_SIZE]
    older = shown[-1].created_at if len(headings) > _PAGE_SIZE else None
    return Page("reports.html.j2", "Reports", {"reports": shown, "before": older, "is_first": before is None})


def report(sources: Sources, request: Request) -> Response:
    """The report of `at`, the newest without one, as it was published, with a way back. Raises UnknownName."""
    at, store = moment(request, "at"), ReportStore(sources.database)
    stored = store.latest() if at is None else store.made_at(at)
    if stored is None:
        raise UnknownName("there is no report yet" if at is None else f"no report was made at {at.isoformat()}")
    if wants_json(request):
        return as_json({**stored.content, "created_at": stored.created_at, "summary": stored.summary})
    back = '<main>\n<p><a href="/">alphaloop</a> · <a href="/reports">Reports</a></p>'
    return HTMLResponse(stored.html.replace("<main>", back, 1), headers={"Content-Security-Policy": _POLICY})


def drafts(sources: Sources, request: Request) -> Page:
    """Every draft revision that was registered, and every time that one was trained anew."""
    found = {
        "drafts": DraftRegistry(sources.database).all(),
        "refreshes": refresh_lines(sources.database, sources.settings.models),
    }
    return Page("drafts.html.j2", "Drafts", found)
