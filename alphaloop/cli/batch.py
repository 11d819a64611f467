"""`alphaloop batch`: OpenAI batch files in, output and error files out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Final

import typer

from alphaloop.batches.lines import BatchReader, batch_id_of
from alphaloop.batches.progress import Batch, Part, counted, rows_of
from alphaloop.batches.sending import send
from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, print_json
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.kafka.cancelling import request_cancellation
from alphaloop.outcomes.reading import OutcomeReader
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.wording import counts

SUBMIT_EXAMPLE: Final = "alphaloop batch submit requests.jsonl --task chat --wait"
STATUS_EXAMPLE: Final = "alphaloop batch status requests.jsonl"
CANCEL_EXAMPLE: Final = "alphaloop batch cancel requests.jsonl"
OUTPUT_EXAMPLE: Final = "alphaloop batch output requests.jsonl --to output.jsonl"
ERRORS_EXAMPLE: Final = "alphaloop batch errors requests.jsonl --to errors.jsonl"
_BATCH: Final = typer.Argument(help="The batch's file, or the batch_id that its jobs were sent with.")
_TO: Final = typer.Option(None, help="File to write, replaced when it is complete; standard output without one.")


def submit(
    context: typer.Context,
    file: Path = typer.Argument(help="JSONL of requests in OpenAI's batch form."),
    task: str = typer.Option(help="Task of lines that name none."),
    ignore_model: bool = typer.Option(False, "--ignore-model", help="Leave out the model that lines name."),
    wait: bool = typer.Option(False, "--wait", help="Wait until every request has ended."),
    timeout: float = typer.Option(86_400.0, min=0.0, help="Seconds to wait."),
    as_json: bool = typer.Option(False, "--json", help="Print the status as JSON."),
) -> None:
    """Send the requests of a batch file. A wrong line is left out and goes to the errors.

    An interrupted submission is repeated: the same file is the same batch, and requests that a worker has already seen
    are not sent again. The batch's id is printed.
    """
    settings = connected_settings(context)
    if task not in settings.tasks:
        raise ConfigError(f"no task {task!r}", hint=f"expected one of {', '.join(settings.tasks)}")
    batch = Batch(batch_id_of(file), file)
    with closing(open_database(settings)) as database, ExitStack() as stack:
        reader = stack.enter_context(OutcomeReader(settings.kafka, set(settings.tasks))) if wait else None
        lines = BatchReader(settings, batch.batch_id, task=task, ignores_model=ignore_model)
        with file.open("rb") as requests:
            sent = send(lines.read(requests), settings, database)
        if not sent.num_lines:
            raise ConfigError(f"{file}: expected one request a line, found no line with text")
        note(f"{sent.num_sent} requests sent")
        if not as_json:
            sys.stdout.write(f"{batch.batch_id}\n")
            sys.stdout.flush()
        if reader is not None:
            _wait(reader, sent.waiting, timeout)
        _tell_status(batch, settings, database, as_json=as_json)


def status(
    context: typer.Context,
    batch: str = _BATCH,
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Count the requests of a batch by what became of them."""
    settings = connected_settings(context)
    with closing(open_database(settings)) as database:
        _tell_status(Batch.named(batch), settings, database, as_json=as_json)


def cancel(context: typer.Context, batch: str = _BATCH) -> None:
    """Ask the workers to cancel every request that has not ended. What has ended keeps its outcome."""
    settings = connected_settings(context)
    with closing(open_database(settings)) as database:
        rows = rows_of(Batch.named(batch), settings, database)
        open_jobs = [row.job_id for row in rows if row.part == "open" and row.job_id]
    request_cancellation(settings.kafka, open_jobs)
    note(f"asked to cancel {len(open_jobs)} requests; `alphaloop batch status` shows what became of them")


def output(context: typer.Context, batch: str = _BATCH, to: Path | None = _TO) -> None:
    """Write the output file so far: one line for each request that succeeded, as OpenAI's."""
    _write(context, batch, to, "output")


def errors(context: typer.Context, batch: str = _BATCH, to: Path | None = _TO) -> None:
    """Write the error file so far: one line for each request that has no text, wrong lines among them."""
    _write(context, batch, to, "error")


def _wait(reader: OutcomeReader, waiting: dict[str, None], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for outcome in reader.outcomes(waiting, timeout_s=timeout_s):
        waiting.pop(outcome.job_id, None)
    if waiting and time.monotonic() >= deadline:
        raise AlphaloopError(
            f"{len(waiting)} requests have not ended within {timeout_s:g} s",
            hint="they go on; `alphaloop batch status` shows how far they are",
        )


def _tell_status(batch: Batch, settings: Settings, database: Database, *, as_json: bool) -> None:
    found = counted(rows_of(batch, settings, database))
    if as_json:
        print_json(found.as_json(batch.batch_id))
    else:
        note(f"{batch.batch_id}: {found.state}; {counts(found.by_status)}")


def _write(context: typer.Context, name: str, to: Path | None, part: Part) -> None:
    settings = connected_settings(context)
    num_open = 0
    contents = ContentStore.of(settings.claim_check)
    with closing(open_database(settings)) as database, _target(to) as target:
        for row in rows_of(Batch.named(name), settings, database, contents):
            num_open += row.part == "open"
            if row.part == part:
                target.write(json.dumps(row.row) + "\n")
    if num_open:
        note(f"{num_open} requests have not ended yet")


@contextmanager
def _target(to: Path | None) -> Iterator[IO[str]]:
    if to is None:
        yield sys.stdout
        return
    part = to.with_name(f"{to.name}.part")
    try:
        with part.open("w", encoding="utf-8") as target:
            yield target
        os.replace(part, to)
    except OSError as error:
        raise ConfigError(f"{to}: {error.strerror or error}", hint="--to takes a file that can be written") from None
