"""`alphaloop explain TASK`: the evidence, the expected goodput of each alternative, and the decision."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.explaining.document import document
from alphaloop.cli.explaining.explanation import ExplainRequest, explain_task
from alphaloop.cli.explaining.screens import show
from alphaloop.cli.moments import moment
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import print_json
from alphaloop.errors import ConfigError
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.past import PastStore

EXAMPLE: Final = """\
alphaloop explain code --batch 4
alphaloop explain code --segment gold --at 2026-09-01T12:00
alphaloop explain chat --sampling 't<=1.0' --at 3d --json"""

#: As alphaloop.acceptance.sampling_bucket makes them.
_BUCKET: Final = re.compile(r"greedy(,adjusted)?|t(<=0\.5|<=1\.0|>1\.0)(,cut)?(,seeded)?(,adjusted)?")


def explain(
    context: typer.Context,
    task: str = typer.Argument(help="The task to explain."),
    segment: str = typer.Option("", help="Segment of the jobs; jobs without a segment, if not given."),
    at: str | None = typer.Option(None, help="As of an earlier time: 2026-09-01T12:00 (UTC), or 90m, 2h, 3d ago."),
    batch: int | None = typer.Option(None, min=1, help="Number of running sequences; worker.batch_size, if not given."),
    sampling: str = typer.Option("greedy", help="Sampling bucket: greedy, t<=0.5, t<=1.0 …"),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Show how a task is decoded, and why.

    Applies the policy of a worker to the same evidence and the same measured costs. Prints the evidence, the
    alternatives with their expected goodput, the reason, measurements, and the last changes of the choice.
    """
    now = datetime.now(UTC)
    when = now if at is None else moment(at, now, "--at")
    if not _BUCKET.fullmatch(sampling):
        raise ConfigError(
            f"--sampling: expected a sampling bucket, found {sampling[:60]!r}",
            hint="greedy, t<=0.5, t<=1.0 or t>1.0; with ,cut ,seeded ,adjusted where it applies",
        )
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        check_task(database, settings, task)
        request = ExplainRequest(task, segment, batch or settings.worker.batch_size, sampling, when, at is None)
        found = explain_task(database, settings, request)
    if as_json:
        print_json(document(found))
    else:
        show(found)


def check_task(database: Database, settings: Settings, task: str) -> None:
    """Raises ConfigError for a task that is neither configured nor in history."""
    if not settings.tasks or task in settings.tasks:
        return
    seen = PastStore(database).tasks()
    if task not in seen:
        known = sorted({*settings.tasks, *seen})
        raise ConfigError(f"no task {task!r} in configs/tasks.toml or in history", hint=f"one of {', '.join(known)}")
