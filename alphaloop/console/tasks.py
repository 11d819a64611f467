"""The tasks: those that are busy now, the list with how each is decoded, and one task in depth."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.requests import Request

from alphaloop.console.page import Page, text
from alphaloop.console.reading import Sources, errors_of
from alphaloop.errors import UnknownName
from alphaloop.explaining.explanation import Explanation, explain_task, usual_request
from alphaloop.explaining.wording import document, opening
from alphaloop.messages import Purpose
from alphaloop.pages import drawing
from alphaloop.store.coordination import ScheduleStore
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drift import DriftEventStore, IncidentStore
from alphaloop.store.reports import ReportStore
from alphaloop.store.task_figures import TaskFigures, TaskPages, figures_of
from alphaloop.store.traffic import WINDOW, DecodedLately, decoded_lately
from alphaloop.store.workers import heard_lately

#: Tasks that are listed: the busiest.
_MAX_TASKS: Final = 20
_PAGE_SIZE: Final = 50
_NUM_CHANGES: Final = 20
#: Alternatives that are listed; the JSON twin has them all.
_MAX_ALTERNATIVES: Final = 12


def now(sources: Sources, request: Request) -> Page:
    """Everything at a glance."""
    database = sources.database
    tasks, waiting = sources.tasks(), sources.waiting()
    lately = sources.remembered.get("lately", lambda: decoded_lately(database))
    workers = sources.workers()
    heard = heard_lately(workers)
    speeds = [worker.load.tokens_per_s for worker in heard if worker.load.tokens_per_s is not None]
    activity = by_activity(sources.every_task(workers), lately.value or [], waiting.value)
    run = ScheduleStore(database).newest()
    return Page(
        "now.html.j2",
        "Now",
        {
            "num_waiting": None if waiting.value is None else sum(waiting.value.values()),
            "num_held": None if tasks.value is None else sum(now.num_held for now in tasks.value),
            "num_workers": len(heard),
            "num_running": sum(len(worker.load.tokens) for worker in heard),
            "num_slots": sum(worker.load.num_slots for worker in heard),
            "tokens_per_s": sum(speeds) if speeds else None,
            "workers": [worker.as_json() for worker in workers],
            "tasks": activity[:_MAX_TASKS],
            "num_other_tasks": max(0, len(activity) - _MAX_TASKS),
            "window_s": WINDOW.total_seconds(),
            "lately_read_at": lately.read_at,
            "drift": DriftEventStore(database).open_events(),
            "incidents": IncidentStore(database).open_incidents(),
            "last_run": None if run is None else {"started_at": run[0], "ended_at": run[1], "outcome": run[2]},
            "read_at": tasks.read_at,
            "waiting_read_at": waiting.read_at,
            "errors": errors_of(tasks=tasks, broker=waiting, **{"last minute": lately}),
        },
    )


def by_activity(
    tasks: Sequence[TaskFigures], decoded: Sequence[DecodedLately], waiting: Mapping[str, int] | None
) -> list[_TaskActivity]:
    """The tasks with jobs that wait, run or have just ended, the busiest first."""
    ended, measuring, tokens = Counter[str](), Counter[str](), Counter[str]()
    for lately in decoded:
        (ended if lately.purpose == Purpose.TRAFFIC else measuring)[lately.task] += lately.num_jobs
        tokens[lately.task] += lately.num_tokens
    held = {now.task: now.num_held for now in tasks if now.num_held}
    why = {now.task: now.not_served for now in tasks}
    waits = {task: number for task, number in (waiting or {}).items() if number}
    busy = []
    for task in {*held, *ended, *measuring, *waits}:
        num_waiting = None if waiting is None else waits.get(task, 0)
        counted = ended[task], measuring[task], tokens[task]
        busy.append(_TaskActivity(task, num_waiting, held.get(task, 0), *counted, why.get(task)))
    return sorted(
        busy, key=lambda lately: (-lately.num_tokens, -lately.num_held, -(lately.num_waiting or 0), lately.task)
    )


@dataclass(frozen=True, slots=True)
class _TaskActivity:
    """A busy task."""

    task: str
    num_waiting: int | None  #: jobs that no worker has claimed; None where the broker does not answer
    num_held: int  #: claimed, and not ended
    num_ended: int  #: jobs of traffic that were decoded in the last minute
    num_measuring: int  #: probes and controls that were
    num_tokens: int  #: of all of those
    not_served: str | None  #: why no worker takes its jobs; None where one does


def tasks(sources: Sources, request: Request) -> Page:
    """A page of tasks by name: those whose name holds `q`, after the task `behind`."""
    wanted, behind = text(request, "q"), text(request, "behind")
    reading, waiting = sources.tasks(), sources.waiting()
    matching = [now for now in sources.every_task(sources.workers()) if wanted in now.task]
    begin = bisect_right(matching, behind, key=lambda now: now.task) if behind else 0
    shown = matching[begin : begin + _PAGE_SIZE]
    names = [now.task for now in shown]
    pages = TaskPages(sources.database)
    changes = pages.last_changes(names)
    hours = pages.by_hour(names, datetime.now(UTC) - timedelta(hours=drawing.HOURS))
    return Page(
        "tasks.html.j2",
        "Tasks",
        {
            "tasks": [
                now.as_json(waiting.value) | {"last_change": changes.get(now.task), "by_hour": hours.get(now.task, [])}
                for now in shown
            ],
            "q": wanted,
            "num_tasks": len(matching),
            "first": begin + 1 if shown else 0,
            "behind": names[-1] if begin + _PAGE_SIZE < len(matching) else None,
            "read_at": reading.read_at,
            "errors": errors_of(tasks=reading, broker=waiting),
        },
        {"rows": [(now, changes.get(now.task), hours.get(now.task, [])) for now in shown], "waiting": waiting.value},
    )


def task(sources: Sources, request: Request) -> Page:
    """The task that the address names. Raises UnknownName for one that is neither configured nor in use."""
    name = request.path_params["task"]
    waiting = sources.waiting()
    now = next((figures for figures in sources.every_task(sources.workers()) if figures.task == name), None)
    changes = DecisionLog(sources.database).latest(name, _NUM_CHANGES)
    if now is None and not changes and name not in sources.settings.tasks:
        raise UnknownName(f"no task {name[:100]!r} is configured, in use, or in the log of decisions")

    def explain() -> Explanation:
        """As `alphaloop explain TASK` does without options."""
        request = usual_request(figures_of(sources.database, name), datetime.now(UTC), is_now=True)
        return explain_task(sources.database, sources.settings, request)

    explained = sources.remembered.get(("explain", name), explain)
    explanation = explained.value
    return Page(
        "task.html.j2",
        name,
        {
            "task": name,
            "now": None if now is None else now.as_json(waiting.value),
            "opening": None if explanation is None else " ".join(opening(explanation)),
            "explanation": None if explanation is None else document(explanation),
            "explained_at": explained.read_at,
            "explain_error": explained.error,
            "history": _history(sources, name),
            "changes": changes,
            "drift": [event for event in DriftEventStore(sources.database).open_events() if event.subject.task == name],
            "num_waiting": None if waiting.value is None else waiting.value.get(name, 0),
        },
        {"its": now, "found": explanation, "max_alternatives": _MAX_ALTERNATIVES},
    )


def _history(sources: Sources, name: str) -> dict[str, Any] | None:
    """Acceptance of the task over time as the newest report has it; None where that has none."""

    def read() -> tuple[datetime, Mapping[str, Any]] | None:
        report = ReportStore(sources.database).latest()
        return None if report is None else (report.created_at, report.content.get("history", {}))

    newest = sources.remembered.get("history", read).value
    if newest is None or name not in newest[1]:
        return None
    return {"reported_at": newest[0], **newest[1][name]}
