"""The tasks: how each is decoded, and what that brings."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from typing import Final

from starlette.requests import Request

from alphaloop.console.page import Page
from alphaloop.console.sources import Sources
from alphaloop.console.views.asked import text
from alphaloop.pages import drawing
from alphaloop.store.task_figures import TaskPages, with_waiting

PAGE_SIZE: Final = 50


def tasks(sources: Sources, request: Request) -> Page:
    """A page of tasks by name: those whose name holds `q`, behind the task `behind`."""
    wanted, behind = text(request, "q"), text(request, "behind")
    reading, waiting = sources.tasks(), sources.waiting()
    found = [now for now in with_waiting(reading.value or [], waiting.value) if wanted in now.task]
    begin = bisect_right(found, behind, key=lambda now: now.task) if behind else 0
    shown = found[begin : begin + PAGE_SIZE]
    names = [now.task for now in shown]
    pages = TaskPages(sources.database)
    changes = pages.last_changes(names)
    hours = pages.by_hour(names, datetime.now(UTC) - timedelta(hours=drawing.HOURS))
    return Page(
        "tasks.html.j2",
        "Tasks",
        {
            "tasks": [
                {
                    **now.as_json(waiting.value),
                    "last_change": changes.get(now.task),
                    "by_hour": hours.get(now.task, []),
                }
                for now in shown
            ],
            "q": wanted,
            "num_tasks": len(found),
            "first": begin + 1 if shown else 0,
            "behind": names[-1] if begin + PAGE_SIZE < len(found) else None,
            "read_at": reading.read_at,
            "errors": {name: one.error for name, one in (("tasks", reading), ("broker", waiting)) if one.error},
        },
        {"rows": [(now, changes.get(now.task), hours.get(now.task, [])) for now in shown], "waiting": waiting.value},
    )
