"""One task in depth: what `alphaloop explain` says, acceptance over time, and how its choice changed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request

from alphaloop.console.page import NotFound, Page
from alphaloop.console.sources import Sources
from alphaloop.explaining.explanation import ExplainRequest, explain_task, usual_request
from alphaloop.explaining.wording import document, opening
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.reports import ReportStore
from alphaloop.store.task_figures import figures_of

NUM_CHANGES: Final = 20
#: Alternatives that are listed; the JSON twin has them all.
MAX_ALTERNATIVES: Final = 12


def task(sources: Sources, request: Request) -> Page:
    """The task that the address names. Raises NotFound for one that is neither configured nor in use."""
    name = request.path_params["task"]
    tasks = sources.tasks()
    now = next((one for one in tasks.value or [] if one.task == name), None)
    changes = DecisionLog(sources.database).latest(name, NUM_CHANGES)
    if now is None and not changes and name not in sources.settings.tasks:
        raise NotFound(f"no task {name[:100]!r} is configured, in use, or in the log of decisions")
    explained = sources.remembered.get(("explain", name), lambda: explain_task(*_asked(sources, name)))
    found = explained.value
    waiting = sources.waiting()
    return Page(
        "task.html.j2",
        name,
        {
            "task": name,
            "now": None if now is None else now.as_json(waiting.value),
            "opening": None if found is None else " ".join(opening(found)),
            "explanation": None if found is None else document(found),
            "explained_at": explained.read_at,
            "explain_error": explained.error,
            "history": _history(sources, name),
            "changes": changes,
            "drift": [one for one in DriftEventStore(sources.database).open_events() if one.subject.task == name],
            "num_waiting": None if waiting.value is None else waiting.value.get(name, 0),
        },
        {"its": now, "found": found, "max_alternatives": MAX_ALTERNATIVES},
    )


def _asked(sources: Sources, name: str) -> tuple[Any, Any, ExplainRequest]:
    """What `alphaloop explain TASK` asks for without options."""
    figures = figures_of(sources.database, name)
    request = usual_request(figures, datetime.now(UTC), is_now=True)
    return sources.database, sources.settings, request


def _history(sources: Sources, name: str) -> dict[str, Any] | None:
    """Acceptance of the task over time as the newest report has it; None where that has none."""

    def read() -> tuple[datetime, Mapping[str, Any]] | None:
        report = ReportStore(sources.database).latest()
        return None if report is None else (report.created_at, report.content.get("history", {}))

    newest = sources.remembered.get("history", read).value
    if newest is None or name not in newest[1]:
        return None
    return {"reported_at": newest[0], **newest[1][name]}
