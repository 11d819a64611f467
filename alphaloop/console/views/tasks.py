"""The tasks: how each is decoded, and what that brings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.requests import Request

from alphaloop.console import drawing
from alphaloop.console.page import Page
from alphaloop.console.sources import Sources
from alphaloop.console.views.asked import text
from alphaloop.store.overview import TaskNow
from alphaloop.store.task_pages import TaskPages

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
                    **task_document(now, waiting.value),
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


def with_waiting(found: Sequence[TaskNow], waiting: Mapping[str, int] | None) -> list[TaskNow]:
    """Also the tasks whose jobs only wait, by name."""
    known = {now.task for now in found}
    fresh = [TaskNow(task) for task, number in (waiting or {}).items() if number and task not in known]
    return sorted([*found, *fresh], key=lambda now: now.task)


def task_document(now: TaskNow, waiting: Mapping[str, int] | None) -> dict[str, Any]:
    """A task as JSON: its counts, and the rates that the page shows."""
    return {
        **asdict(now),
        "num_jobs": now.num_jobs,
        "num_probes": now.num_probes,
        "num_controls": now.num_controls,
        "waiting": None if waiting is None else waiting.get(now.task, 0),
        "tokens_per_s": now.measured.tokens_per_s if now.measured else None,
        "vanilla_tokens_per_s": now.measured.vanilla_tokens_per_s if now.measured else None,
    }
