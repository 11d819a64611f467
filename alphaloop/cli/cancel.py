"""`alphaloop cancel`: a request on the control topic, what it found, and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.ends import ends, jobs_named
from alphaloop.cli.options import connected_settings, global_options
from alphaloop.cli.screen import note, out, print_json
from alphaloop.cli.waiting_again import say_they_go_on, wait_again
from alphaloop.errors import AlphaloopError
from alphaloop.kafka.producer import request_cancellation
from alphaloop.outcomes.reading import status_of
from alphaloop.outcomes.whereabouts import JobPlace, Whereabouts, find_jobs
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.wording import counts, one_line

_MAX_SHOWN: Final = 20
EXAMPLE: Final = """\
alphaloop cancel 5f0c6f9d2b3e4a0f9a7f4f4e6c9a1b2d --wait
alphaloop cancel --batch-id monday"""


def cancel(
    context: typer.Context,
    job_id: list[str] = typer.Argument(None, help="The jobs to cancel."),
    batch_id: str | None = typer.Option(None, help="Every job that was sent with this batch_id."),
    wait: bool = typer.Option(False, "--wait", help="Wait until each job has ended, and say how."),
    timeout: float = typer.Option(60.0, min=0.0, help="Seconds to wait with --wait."),
    as_json: bool = typer.Option(False, "--json", help="Print what was found, and with --wait the end, as JSON."),
) -> None:
    """Ask the workers to cancel jobs, and say where each of them was found.

    A job that has ended keeps its outcome. Any other is reported as cancelled in its result, unless it ends before
    the request arrives. The exit code is 1 if a job is unknown; it is cancelled should it still come.
    """
    if not job_id and batch_id is None:
        raise typer.BadParameter("expected job_ids or --batch-id")
    settings = connected_settings(context)
    with closing(open_database(settings)) as database:
        wanted = list(job_id or [])
        if batch_id is not None:
            wanted += jobs_named(settings, database, batch_id)
        if not wanted:
            raise AlphaloopError(f"no job of batch {batch_id} was found")
        found = find_jobs(settings, database, list(dict.fromkeys(wanted)))
        asked = [one.job_id for one in found if one.place not in (JobPlace.ENDED, JobPlace.REFUSED)]
        request_cancellation(settings.kafka, asked)
        if not as_json:
            _tell(found, len(asked))
        awaited = [one.job_id for one in found if one.job_id in asked and one.place is not JobPlace.UNKNOWN]
        ended = _await(context, settings, database, awaited, timeout) if wait else {}
    if as_json:
        print_json([_as_json(one, ended.get(one.job_id)) for one in found])
    elif ended:
        note(f"ended: {counts(_count(list(ended.values())))}")
    if wait and (missing := len(awaited) - len(ended)):
        raise AlphaloopError(
            f"{missing} {'job' if missing == 1 else 'jobs'} did not end within {timeout:g} s",
            hint="is a worker running? `alphaloop status` shows it",
        )
    if any(one.place is JobPlace.UNKNOWN for one in found):
        raise typer.Exit(1)


def _tell(found: Sequence[Whereabouts], num_asked: int) -> None:
    for one in found[:_MAX_SHOWN]:
        out().print(one_line(f"{one.job_id}: {one.sentence()}"), soft_wrap=True)
    if len(found) > _MAX_SHOWN:
        out().print(f"… and {len(found) - _MAX_SHOWN} more: {counts(_count([one.place.value for one in found]))}")
    if num_asked:
        note(f"asked to cancel {num_asked} job{'s' if num_asked > 1 else ''}; the answer is the job's result")
    else:
        note("nothing to cancel")


def _await(
    context: typer.Context, settings: Settings, database: Database, job_ids: Sequence[str], timeout_s: float
) -> dict[str, str]:
    """How each of the jobs ended. Ctrl-C ends the command."""
    ended: dict[str, str] = {}
    try:
        for one in ends(settings, database, job_ids, timeout_s=timeout_s):
            ended[one.job_id] = status_of(one)
    except KeyboardInterrupt:
        left = [job_id for job_id in job_ids if job_id not in ended]
        say_they_go_on(len(left), wait_again(global_options(context), left))
        raise typer.Exit(130) from None
    return ended


def _as_json(one: Whereabouts, ended: str | None) -> dict[str, Any]:
    return {**one.as_json(), **({"ended": ended} if ended else {})}


def _count(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}
