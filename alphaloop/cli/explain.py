"""`alphaloop explain TASK`: the evidence, the expected goodput of each alternative, and the decision."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.explaining.screens import show
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import print_json
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.explaining.explanation import ExplainRequest, Explanation, explain_recorded, explain_task, usual_request
from alphaloop.explaining.wording import document
from alphaloop.moments import moment, shown
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.snapshots import SnapshotStore
from alphaloop.store.task_figures import figures_of
from alphaloop.store.traffic import TrafficStore

EXAMPLE: Final = """\
alphaloop explain code --batch 4
alphaloop explain code --segment gold --at 2026-09-01T12:00
alphaloop explain --job 0b5c1c1e
alphaloop explain chat --sampling 't<=1.0' --at 3d --json"""

#: As alphaloop.acceptance.sampling_bucket makes them.
_BUCKET: Final = re.compile(r"greedy(,adjusted)?|t(<=0\.5|<=1\.0|>1\.0)(,cut)?(,seeded)?(,adjusted)?")


def explain(
    context: typer.Context,
    task: str | None = typer.Argument(None, help="The task to explain."),
    job: str | None = typer.Option(None, help="A decoded job, by its id, in place of a task."),
    segment: str = typer.Option("", help="Segment of the jobs; jobs without a segment, if not given."),
    at: str | None = typer.Option(
        None, help="The last decision up to a time: 2026-09-01T12:00 (UTC), or 90m, 2h, 3d ago."
    ),
    batch: int | None = typer.Option(
        None,
        min=1,
        help="Batch size; if not given, the usual one of the last day. With --at: a decision beside about so many.",
    ),
    sampling: str | None = typer.Option(
        None, help="Sampling bucket: greedy, t<=0.5, t<=1.0 …; if not given, that of most jobs of the last day."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Show how a task is decoded, and why.

    Applies the policy of a worker to the same evidence and the same measured costs. Prints the evidence, the
    alternatives with their expected goodput, the reason, measurements, and the last changes of the choice. With --at or
    --job, takes a past decision again from its snapshot.
    """
    if (task is None) == (job is None):
        raise typer.BadParameter("expected either a task or --job: alphaloop explain code, alphaloop explain --job ID")
    now = datetime.now(UTC)
    when = now if at is None else moment(at, now, "--at")
    if sampling is not None and not _BUCKET.fullmatch(sampling):
        raise ConfigError(
            f"--sampling: expected a sampling bucket, found {sampling[:60]!r}",
            hint="greedy, t<=0.5, t<=1.0 or t>1.0; with ,cut ,seeded ,adjusted where it applies",
        )
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        if job is not None:
            found = _explain_job(database, settings, job)
        elif task is not None:
            check_task(database, settings, task)
            figures = figures_of(database, task, None if at is None else when)
            usual = usual_request(figures, when, is_now=at is None, segment=segment)
            request = replace(usual, batch=batch or usual.batch, sampling_bucket=sampling or usual.sampling_bucket)
            if at is None:
                found = explain_task(database, settings, request)
            else:
                found = _explain_last(database, settings, request, batch)
    if as_json:
        print_json(document(found))
    else:
        show(found)


def _explain_last(database: Database, settings: Settings, request: ExplainRequest, batch: int | None) -> Explanation:
    """The last decision up to the moment, with a batch the last beside about so many sequences."""
    store = SnapshotStore(database)
    stored = store.last(request.task, request.sampling_bucket, request.at, running=batch)
    if stored is None:
        beside = f" at a batch of about {batch}" if batch else ""
        kept = store.first_and_last(request.task)
        found = "none of the task" if kept is None else f"those from {shown(kept[0])} to {shown(kept[1])}"
        raise AlphaloopError(
            f"expected a decision of {request.task}, {request.sampling_bucket}{beside}, up to {shown(request.at)}, "
            f"found {found}",
            hint="decisions are kept for `scheduler.history_retention_days`; without --at: what would be decided now",
        )
    return explain_recorded(database, settings, stored, segment=request.segment)


def _explain_job(database: Database, settings: Settings, job_id: str) -> Explanation:
    store = SnapshotStore(database)
    stored, kind = store.of_job(job_id), store.kind_of_job(job_id)
    if kind is None or stored is None:
        raise AlphaloopError(
            f"no recorded decision of job {job_id}",
            hint="it was not decoded, or that was more than `scheduler.history_retention_days` ago",
        )
    return explain_recorded(database, settings, stored, segment=kind[0], prompt_bucket=kind[1])


def check_task(database: Database, settings: Settings, task: str) -> None:
    """Raises ConfigError for a task that is neither configured nor in history."""
    if not settings.tasks or task in settings.tasks:
        return
    seen = TrafficStore(database).tasks()
    if task not in seen:
        known = sorted({*settings.tasks, *seen})
        raise ConfigError(f"no task {task!r} in configs/tasks.toml or in history", hint=f"one of {', '.join(known)}")
