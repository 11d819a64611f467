"""`alphaloop wait`: the results of jobs that were sent before."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import typer

from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.connection import open_database
from alphaloop.cli.ends import ends, jobs_named
from alphaloop.cli.options import connected_settings, global_options
from alphaloop.cli.screen import as_shown, note, print_json_line
from alphaloop.cli.sending import row_of, texts_of
from alphaloop.cli.waiting_again import say_they_go_on, wait_again
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.files import STANDARD, Destination, reading, shown_name
from alphaloop.outcomes.reading import Outcome, is_success, reason_of, status_of
from alphaloop.wording import json_text, one_line

EXAMPLE: Final = """\
alphaloop wait order-4711 order-4712
alphaloop wait --batch-id monday --output results.jsonl
alphaloop wait --file results.jsonl --json"""


def wait(
    context: typer.Context,
    job_id: list[str] = typer.Argument(None, help="The jobs to wait for."),
    batch_id: str | None = typer.Option(None, help="Every job that was sent with this batch_id."),
    file: Path | None = typer.Option(
        None,
        "--file",
        "-f",
        help="JSONL with a job_id a line: jobs, or the output of an interrupted wait; - for standard input.",
    ),
    timeout: float = typer.Option(1800.0, min=0.0, help="Seconds to wait for the ends of the jobs."),
    output: Path | None = typer.Option(
        None, help="JSONL to write the results to, in the order of the jobs; - for standard output."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print each result as a line of JSON when the job ends."),
) -> None:
    """Wait for the results of jobs that were sent before; a job that has ended is answered at once.

    The text of a single job is printed. Ctrl-C ends the wait, and the jobs go on. The exit code is 0 if every job
    succeeded.
    """
    if not job_id and batch_id is None and file is None:
        raise typer.BadParameter("expected job_ids, --batch-id or --file")
    target = None if output is None else Destination.of(output, option="--output", inputs=[file] if file else [])
    settings = connected_settings(context)
    with closing(open_database(settings)) as database, ExitStack() as stack:
        wanted = list(dict.fromkeys([*(job_id or []), *_job_ids(file)]))
        if batch_id is not None:
            wanted = list(dict.fromkeys([*wanted, *jobs_named(settings, database, batch_id)]))
        if not wanted:
            raise AlphaloopError(f"no job of {f'batch {batch_id}' if batch_id else shown_name(file or '')} was found")
        contents = ContentStore.of(settings.claim_check)
        found: dict[str, Outcome] = {}
        stack.callback(lambda: _write(target, wanted, found))
        try:
            for outcome in ends(settings, database, wanted, timeout_s=timeout):
                told = texts_of(outcome, contents)
                assert told is not None  # noqa: S101 - None is only answered with None
                found[outcome.job_id] = told
                _show(told, is_single=len(wanted) == 1 and str(output) != STANDARD, as_json=as_json)
        except KeyboardInterrupt:
            left = [job_id for job_id in wanted if job_id not in found]
            named = None if str(file) == STANDARD else file  # what was read from there is gone
            say_they_go_on(len(left), wait_again(global_options(context), left, batch_id=batch_id, file=named))
            raise typer.Exit(130) from None
    if missing := len(wanted) - len(found):
        raise AlphaloopError(
            f"{missing} of {len(wanted)} jobs have not ended within {timeout:g} s",
            hint="`alphaloop job JOB_ID` says where a job is",
        )
    if not all(map(is_success, found.values())):
        raise typer.Exit(1)


def _job_ids(file: Path | None) -> list[str]:
    if file is None:
        return []
    with reading(file, say=note) as source:
        try:
            rows = [json.loads(line.decode()) for line in source.lines if line.strip()]
        except ValueError as error:
            raise ConfigError(f"{source.name}: {error}", hint="expected JSONL with a job_id a line") from None
    return [row["job_id"] for row in rows if isinstance(row, dict) and isinstance(row.get("job_id"), str)]


def _show(outcome: Outcome, *, is_single: bool, as_json: bool) -> None:
    row = row_of(outcome.job_id, outcome)
    if as_json:
        print_json_line(row)
    elif is_single and isinstance(text := row.get("text"), str):
        sys.stdout.write(f"{as_shown(text)}\n")
    why = reason_of(outcome)
    note(one_line(f"{outcome.job_id}: {status_of(outcome)}" + (f", {why}" if why else "")))


def _write(target: Destination | None, wanted: Sequence[str], found: dict[str, Outcome]) -> None:
    """The rows so far, also after Ctrl-C."""
    if target is None:
        return
    with target.writing() as file:
        file.writelines(json_text(row_of(job_id, found.get(job_id))) + "\n" for job_id in wanted)
