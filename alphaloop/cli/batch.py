"""`alphaloop batch`: OpenAI batch files in, output and error files out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import typer

from alphaloop.batches.lines import BatchReader, Request, batch_id_of
from alphaloop.claim_check.contents import by_reference
from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.batch_rows import Batch, Part, pages, rows_of
from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.outcomes import OutcomeReader
from alphaloop.cli.screen import note, print_json
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.kafka.cancelling import request_cancellation
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import encode_job
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import known_jobs
from alphaloop.wording import counts

SUBMIT_EXAMPLE: Final = "alphaloop batch submit requests.jsonl --task chat --wait"
STATUS_EXAMPLE: Final = "alphaloop batch status requests.jsonl"
CANCEL_EXAMPLE: Final = "alphaloop batch cancel requests.jsonl"
OUTPUT_EXAMPLE: Final = "alphaloop batch output requests.jsonl --to output.jsonl"
ERRORS_EXAMPLE: Final = "alphaloop batch errors requests.jsonl --to errors.jsonl"
_FLUSH_S: Final = 120.0
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
        waiting = _send(file, lines, settings, database)
        if not as_json:
            sys.stdout.write(f"{batch.batch_id}\n")
            sys.stdout.flush()
        if reader is not None:
            _wait(reader, waiting, timeout)
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


def _send(path: Path, lines: BatchReader, settings: Settings, database: Database) -> dict[str, None]:
    """Send what no worker has seen; returns the jobs that have not ended."""
    ensure_topics(settings.kafka, settings.tasks)
    contents = ContentStore.of(settings.claim_check)
    waiting: dict[str, None] = {}
    num_sent, is_empty = 0, True
    with path.open("rb") as file, closing(Producer(settings.kafka, client_id="alphaloop-batch")) as producer:
        for page in pages(lines.read(file)):
            is_empty = False
            jobs = [line.job for line in page if isinstance(line, Request)]
            known = known_jobs(database, [job.job_id for job in jobs])
            for job in jobs:
                if job.job_id not in known:
                    producer.send(
                        jobs_topic(job.task),
                        key=job.job_id.encode(),
                        value=encode_job(by_reference(job, settings.worker.max_job_bytes, contents)),
                    )
                    num_sent += 1
                if job.job_id not in known or known[job.job_id].outcome is None:
                    waiting[job.job_id] = None
        producer.flush(_FLUSH_S)
    if is_empty:
        raise ConfigError(f"{path}: expected one request a line, found no line with text")
    note(f"{num_sent} requests sent")
    return waiting


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
    by_status: Counter[str] = Counter()
    by_part: Counter[Part] = Counter()
    for row in rows_of(batch, settings, database):
        by_status[row.status] += 1
        by_part[row.part] += 1
    state = "in_progress" if by_part["open"] else "cancelled" if by_status["cancelled"] else "completed"
    if as_json:
        totals = {"total": by_part.total(), "completed": by_part["output"], "failed": by_part["error"]}
        found: dict[str, Any] = {"id": batch.batch_id, "object": "batch", "status": state, "request_counts": totals}
        print_json({**found, "requests_by_status": dict(by_status)})
    else:
        note(f"{batch.batch_id}: {state}; {counts(by_status)}")


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
