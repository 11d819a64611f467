"""`alphaloop enqueue`: jobs onto Kafka, and their results back."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.options import connected_settings, global_options
from alphaloop.cli.screen import as_shown, note, print_json
from alphaloop.cli.sending import Summary, carried, report_wrong, send, send_and_wait
from alphaloop.cli.waiting_again import say_they_go_on, wait_again
from alphaloop.errors import AlphaloopError
from alphaloop.files import STANDARD, Destination, reading
from alphaloop.job_lines import BadLine, JobLine, JobReader, Overrides
from alphaloop.messages import Decoding
from alphaloop.messages.topics import high_topic, jobs_topic
from alphaloop.moments import FORMS_AHEAD, moment_ahead
from alphaloop.wording import counts, json_text, rate

EXAMPLE: Final = """\
alphaloop enqueue --task code --prompt "def fibonacci(n):" --max-tokens 64 --wait
alphaloop enqueue --file jobs.jsonl --file more.jsonl --wait --output results.jsonl
cat batch.jsonl | alphaloop enqueue --task chat --file - --batch-id monday"""


def enqueue(
    context: typer.Context,
    file: list[str] = typer.Option(
        [], "--file", "-f", help="JSONL file of jobs, - for standard input; may be repeated."
    ),
    task: str | None = typer.Option(None, help="Task of the prompt, and of lines that name none."),
    prompt: str | None = typer.Option(None, help="One prompt instead of a file."),
    max_tokens: int | None = typer.Option(None, min=1, help="Upper bound on generated tokens, for every job."),
    temperature: float | None = typer.Option(None, min=0.0, max=2.0, help="0 is greedy; for every job."),
    decoding: Decoding | None = typer.Option(None, help="Decide from history, or force one mode."),
    segment: str | None = typer.Option(None, help="Label that may split a task's history."),
    batch_id: str | None = typer.Option(None, help="Label of this group of jobs, echoed in the results."),
    priority: int | None = typer.Option(None, min=-100, max=100, help="Jobs of a task with a higher one start first."),
    deadline: str | None = typer.Option(None, help=f"A job that has not ended by then expires: {FORMS_AHEAD}."),
    high: bool = typer.Option(False, "--high", help="Send to jobs.TASK.high: these start before the task's others."),
    strict: bool = typer.Option(False, "--strict", help="Send nothing if a line is wrong."),
    stream: bool = typer.Option(
        False, "--stream", help="Print texts while they are decoded, as `alphaloop tail`; implies --wait."
    ),
    wait: bool = typer.Option(False, "--wait", help="Wait for every job's result."),
    timeout: float = typer.Option(1800.0, min=0.0, help="Seconds to wait for results."),
    output: Path | None = typer.Option(
        None, help="JSONL of results in the order of the input, - for standard output; implies --wait."
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print the summary and the job_ids as JSON; with --wait and no --output, the results too."
    ),
) -> None:
    """Send jobs, and wait for their results if asked to.

    A line is {"task": …, "prompt": …}, a whole job, or a line of an OpenAI batch file. A wrong line is reported with
    its place, and the others are sent. A file without a job is an error. Ctrl-C ends a wait; the jobs go on, and
    `alphaloop wait` waits for them again. The exit code is 1 if a line was wrong or a job did not succeed.
    """
    if bool(file) == (prompt is not None):
        raise typer.BadParameter("expected either --file or --prompt")
    if prompt is not None and task is None:
        raise typer.BadParameter("--prompt needs --task")
    if stream and (as_json or str(output) == STANDARD):
        raise typer.BadParameter("--stream prints texts: expected it without --json and --output -")
    target = None if output is None else Destination.of(output, option="--output", inputs=file)
    body = {"max_tokens": max_tokens, "temperature": temperature, "stream": stream or None}
    ends_by = deadline and moment_ahead(deadline, datetime.now(UTC), "--deadline").isoformat()
    top = {"decoding": decoding and decoding.value, "segment": segment, "batch_id": batch_id, "priority": priority}
    settings = connected_settings(context, database=False)
    reader = JobReader(settings, task=task, overrides=Overrides(_given(body), _given({**top, "deadline": ends_by})))
    waits = wait or stream or output is not None
    topic_of = high_topic if high else jobs_topic
    with contextlib.ExitStack() as stack:
        contents = ContentStore.of(settings.claim_check)
        items: Iterable[JobLine | BadLine] = carried(
            _read(reader, file, prompt, stack), settings.worker.max_job_bytes, contents
        )
        if waits or strict:
            items = list(items)
        if strict and (wrong := [item for item in items if isinstance(item, BadLine)]):
            report_wrong(wrong)
            raise AlphaloopError(
                f"nothing was sent: {len(wrong)} wrong", hint="without --strict the correct lines are sent"
            )
        summary = Summary()
        shown: list[dict[str, Any]] | None = [] if waits and as_json and output is None else None
        if waits:
            rows = send_and_wait(
                settings.kafka, list(items), summary, timeout, topic_of=topic_of, contents=contents, streams=stream
            )
            _deliver(rows, target, shown, is_single=prompt is not None and not stream)
        else:
            send(settings.kafka, items, summary, show_id=prompt is not None and not as_json, topic_of=topic_of)
    _conclude(summary, waits=waits, as_json=as_json, shown=shown)
    if summary.without_result:
        written = None if output is None or not output.is_file() else output
        options = global_options(context)
        _say_what_is_left(summary, wait_again(options, summary.without_result, batch_id=batch_id, file=written))
    _exit(summary, waits=waits)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _read(
    reader: JobReader, files: Sequence[str], prompt: str | None, stack: contextlib.ExitStack
) -> Iterable[JobLine | BadLine]:
    if prompt is not None:
        return reader.read([json.dumps({"prompt": prompt}).encode()], "--prompt")
    # Opened before anything is read, so that a misspelt second name fails before the first file is sent.
    sources = [stack.enter_context(reading(name, say=note)) for name in files]
    return (item for source in sources for item in reader.read(source.lines, source.name))


def _deliver(
    rows: Iterator[dict[str, Any]], target: Destination | None, shown: list[dict[str, Any]] | None, *, is_single: bool
) -> None:
    if target is None:
        for row in rows:
            if shown is not None:
                shown.append(row)
            elif is_single and row.get("text") is not None:
                sys.stdout.write(f"{as_shown(row['text'])}\n")
        return
    with target.writing() as file:
        for row in rows:
            file.write(json_text(row) + "\n")


def _conclude(summary: Summary, *, waits: bool, as_json: bool, shown: list[dict[str, Any]] | None) -> None:
    summary_text = f"{summary.sent} sent" + (f", {summary.invalid} wrong" if summary.invalid else "")
    if waits and summary.sent:
        summary_text += (
            f"; {counts(summary.by_status)}; {summary.completion_tokens} tokens in {summary.wall_s:.1f} s, "
            f"{rate(summary.tokens_per_s)} tokens/s"
        )
    note(summary_text)
    if as_json:
        print_json({**summary.as_json(), **({} if shown is None else {"results": shown})})


def _say_what_is_left(summary: Summary, again: str) -> None:
    missing = len(summary.without_result)
    if summary.interrupted:
        say_they_go_on(missing, again)
        return
    raise AlphaloopError(
        f"{missing} {'job' if missing == 1 else 'jobs'} had no result within the timeout",
        hint=f"they go on if a worker runs, which `alphaloop status` shows; wait again: {again}",
    )


def _exit(summary: Summary, *, waits: bool) -> None:
    if summary.interrupted:
        raise typer.Exit(130)
    bad = summary.invalid + sum(n for status, n in summary.by_status.items() if status != "succeeded")
    if bad or (waits and not summary.sent):
        raise typer.Exit(1)
