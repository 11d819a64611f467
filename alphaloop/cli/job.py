"""`alphaloop job`: where a job is."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import out, print_json
from alphaloop.outcomes.whereabouts import JobPlace, find_jobs
from alphaloop.wording import one_line

EXAMPLE: Final = "alphaloop job order-4711"


def job(
    context: typer.Context,
    job_id: list[str] = typer.Argument(help="The jobs to look for."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON: a list with an object a job."),
) -> None:
    """Say where jobs are: waiting in Kafka and behind how many, held or decoded by which worker, ended, or refused.

    The tokens so far are those that the worker told within the last seconds. For a job that no worker has claimed the
    messages that wait in Kafka are read, for up to 20 seconds. The exit code is 1 if a job is unknown.
    """
    settings = connected_settings(context)
    with closing(open_database(settings)) as database:
        found = find_jobs(settings, database, list(dict.fromkeys(job_id)))
    if as_json:
        print_json([one.as_json() for one in found])
    else:
        for one in found:
            out().print(one_line(f"{one.job_id}: {one.sentence()}"), soft_wrap=True)
    if any(one.place is JobPlace.UNKNOWN for one in found):
        raise typer.Exit(1)
