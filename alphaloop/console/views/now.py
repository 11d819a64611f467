"""What goes on now: what waits, what runs, on which workers, and how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from alphaloop.console.page import Page
from alphaloop.console.sources import Sources
from alphaloop.messages import Purpose
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.incidents import IncidentStore
from alphaloop.store.schedule import ScheduleStore
from alphaloop.store.task_figures import TaskFigures
from alphaloop.store.traffic import WINDOW, DecodedLately, decoded_lately
from alphaloop.store.workers import WorkerStore

#: Tasks that are listed: the busiest.
MAX_TASKS: Final = 20


@dataclass(frozen=True, slots=True)
class TaskActivity:
    """A task in which something goes on."""

    task: str
    num_waiting: int | None  #: jobs that no worker has claimed; None where the broker does not answer
    num_held: int  #: claimed, and not ended
    num_ended: int  #: jobs of traffic that were decoded in the last minute
    num_measuring: int  #: probes and controls that were
    num_tokens: int  #: of all of those


def now(sources: Sources, request: Request) -> Page:
    """Everything at a glance."""
    database = sources.database
    tasks, waiting = sources.tasks(), sources.waiting()
    lately = sources.remembered.get("lately", lambda: decoded_lately(database))
    workers = WorkerStore(database).seen()
    speeds = [one.load.tokens_per_s for one in workers if one.load.tokens_per_s is not None]
    activity = by_activity(tasks.value or [], lately.value or [], waiting.value)
    run = ScheduleStore(database).newest()
    wrong = {"tasks": tasks.error, "broker": waiting.error, "last minute": lately.error}
    return Page(
        "now.html.j2",
        "Now",
        {
            "num_waiting": None if waiting.value is None else sum(waiting.value.values()),
            "num_held": None if tasks.value is None else sum(now.num_held for now in tasks.value),
            "num_running": sum(len(one.load.tokens) for one in workers),
            "num_slots": sum(one.load.num_slots for one in workers),
            "tokens_per_s": sum(speeds) if speeds else None,
            "workers": [one.as_json() for one in workers],
            "tasks": activity[:MAX_TASKS],
            "num_other_tasks": max(0, len(activity) - MAX_TASKS),
            "window_s": WINDOW.total_seconds(),
            "lately_read_at": lately.read_at,
            "drift": DriftEventStore(database).open_events(),
            "incidents": IncidentStore(database).open_incidents(),
            "last_run": None if run is None else {"started_at": run[0], "ended_at": run[1], "outcome": run[2]},
            "read_at": tasks.read_at,
            "waiting_read_at": waiting.read_at,
            "errors": {name: error for name, error in wrong.items() if error},
        },
    )


def by_activity(
    tasks: Sequence[TaskFigures], decoded: Sequence[DecodedLately], waiting: Mapping[str, int] | None
) -> list[TaskActivity]:
    """The tasks in which something goes on, the busiest first."""
    ended, measuring, tokens = Counter[str](), Counter[str](), Counter[str]()
    for one in decoded:
        (ended if one.purpose == Purpose.TRAFFIC else measuring)[one.task] += one.num_jobs
        tokens[one.task] += one.num_tokens
    held = {now.task: now.num_held for now in tasks if now.num_held}
    waits = {task: number for task, number in (waiting or {}).items() if number}
    found = [
        TaskActivity(
            task,
            None if waiting is None else waits.get(task, 0),
            held.get(task, 0),
            ended[task],
            measuring[task],
            tokens[task],
        )
        for task in {*held, *ended, *measuring, *waits}
    ]
    return sorted(found, key=lambda one: (-one.num_tokens, -one.num_held, -(one.num_waiting or 0), one.task))
