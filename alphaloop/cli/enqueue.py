"""`alphaloop enqueue`: jobs onto Kafka, and their results back."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.options import connected_settings, global_options
from alphaloop.cli.screen import note, print_json
from alphaloop.cli.sending import Summary, carried, report_wrong, send, send_and_wait
from alphaloop.cli.waiting_again import say_they_go_on, wait_again
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.job_lines import BadLine, JobLine, JobReader, Overrides
from alphaloop.messages import Decoding
from alphaloop.messages.topics import high_topic, jobs_topic
from alphaloop.wording import counts, rate

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
    high: bool = typer.Option(False, "--high", help="Send to jobs.TASK.high: these start before the task's others."),
    strict: bool = typer.Option(False, "--strict", help="Send nothing if a line is wrong."),
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
    settings = connected_settings(context, database=False)
    reader = JobReader(settings, task=task, overrides=_overrides(max_tokens, temperature, decoding, segment, batch_id))
    waits = wait or output is not None
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
            rows = send_and_wait(settings.kafka, list(items), summary, timeout, topic_of=topic_of, contents=contents)
            _deliver(rows, output, shown, is_single=prompt is not None)
        else:
            send(settings.kafka, items, summary, show_id=prompt is not None and not as_json, topic_of=topic_of)
    _conclude(summary, waits=waits, as_json=as_json, shown=shown)
    if summary.without_result:
        written = None if output is None or str(output) == "-" else output
        options = global_options(context)
        _say_what_is_left(summary, wait_again(options, summary.without_result, batch_id=batch_id, file=written))
    _exit(summary, waits=waits)


def _overrides(
    max_tokens: int | None,
    temperature: float | None,
    decoding: Decoding | None,
    segment: str | None,
    batch_id: str | None,
) -> Overrides:
    body = {"max_tokens": max_tokens, "temperature": temperature}
    top = {"decoding": decoding and decoding.value, "segment": segment, "batch_id": batch_id}
    return Overrides(
        body={name: value for name, value in body.items() if value is not None},
        top={name: value for name, value in top.items() if value is not None},
    )


def _read(
    reader: JobReader, files: Sequence[str], prompt: str | None, stack: contextlib.ExitStack
) -> Iterable[JobLine | BadLine]:
    if prompt is not None:
        return reader.read([json.dumps({"prompt": prompt}).encode()], "--prompt")
    # Opened before anything is read, so that a misspelt second name fails before the first file is sent.
    opened = [(name, _open(name, stack)) for name in files]
    named = (("standard input" if name == "-" else name, lines) for name, lines in opened)
    return (item for name, lines in named for item in reader.read(lines, name))


def _open(name: str, stack: contextlib.ExitStack) -> Iterable[bytes]:
    if name == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(name, "rb"))
    except OSError as error:
        raise ConfigError(
            f"{name}: {error.strerror or error}", hint="--file takes a JSONL file, or - for standard input"
        ) from None


def _deliver(
    rows: Iterator[dict[str, Any]], output: Path | None, shown: list[dict[str, Any]] | None, *, is_single: bool
) -> None:
    if output is None:
        for row in rows:
            if shown is not None:
                shown.append(row)
            elif is_single and row.get("text") is not None:
                sys.stdout.write(f"{row['text']}\n")
        return
    with contextlib.ExitStack() as stack:
        try:
            target = sys.stdout if str(output) == "-" else stack.enter_context(open(output, "w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{output}: {error.strerror or error}", hint="--output takes a file that can be written"
            ) from None
        for row in rows:
            target.write(json.dumps(row, ensure_ascii=False) + "\n")


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
