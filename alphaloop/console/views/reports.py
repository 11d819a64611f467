"""The reports of the scheduler."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from alphaloop.console.page import NotFound, Page, as_json, wants_json
from alphaloop.console.sources import Sources
from alphaloop.console.views.asked import moment
from alphaloop.store.reports import ReportStore

PAGE_SIZE: Final = 50
#: A report is a page of its own, with its style inside and no script.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"


def reports(sources: Sources, request: Request) -> Page:
    """A page of reports, the newest first, made before `before`."""
    before = moment(request, "before")
    found = ReportStore(sources.database).headings(PAGE_SIZE + 1, before=before)
    shown = found[:PAGE_SIZE]
    older = shown[-1].created_at if len(found) > PAGE_SIZE else None
    return Page("reports.html.j2", "Reports", {"reports": shown, "before": older, "is_first": before is None})


def report(sources: Sources, request: Request) -> Response:
    """The report that was made at `at`, the newest without one, as it was published. Raises NotFound."""
    at, store = moment(request, "at"), ReportStore(sources.database)
    found = store.latest() if at is None else store.made_at(at)
    if found is None:
        raise NotFound("there is no report yet" if at is None else f"no report was made at {at.isoformat()}")
    if wants_json(request):
        return as_json({**found.content, "created_at": found.created_at, "summary": found.summary})
    return HTMLResponse(found.html, headers={"Content-Security-Policy": _POLICY})
