"""`alphaloop enqueue`: send jobs to Kafka, and with --wait write one row for each line of the input."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.cli.jobs import PrintedText, row_of, say_they_go_on, wait_again
from alphaloop.cli.options import connected_settings, example, global_options
from alphaloop.cli.screen import as_shown, note, print_json, progress
from alphaloop.client import Batch, Client, Piece, ResultsMissing
from alphaloop.client.sync import no_high_topic
from alphaloop.errors import AlphaloopError
from alphaloop.files import STANDARD, Destination, reading
from alphaloop.job_lines import BadLine, JobLine, JobReader, Overrides
from alphaloop.kafka.topics import list_topics
from alphaloop.messages import Decoding, Job, Result
from alphaloop.messages.topics import high_topic
from alphaloop.outcomes.reading import as_one_text, reason_of
from alphaloop.settings import KafkaSettings
from alphaloop.wording import FORMS_AHEAD, counts, how_many, json_text, moment_ahead, one_line, rate

_MAX_SHOWN: Final = 20


@example("""\
alphaloop enqueue --task code --prompt "def fib(n):" --max-tokens 64 --wait
alphaloop enqueue --file a.jsonl --file b.jsonl --wait --output texts.jsonl
cat batch.jsonl | alphaloop enqueue --task chat --file - --batch-id monday""")
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
    """Send jobs; with --wait, wait for their results.

    A line is {"task": …, "prompt": …}, a whole job, or a line of an OpenAI batch file. A wrong line is reported with
    its place, and the others are sent. A file without a job is an error. Ctrl-C ends a wait; the jobs go on, and
    `alphaloop wait` waits for them again. The exit code is 1 if a line was wrong or a job did not succeed.
    """
    _check_options(file, task, prompt, streams=stream, prints_json=as_json or str(output) == STANDARD)
    target = None if output is None else Destination.of(output, option="--output", inputs=file)
    ends_by = deadline and moment_ahead(deadline, datetime.now(UTC), "--deadline").isoformat()
    body = _given({"max_tokens": max_tokens, "temperature": temperature, "stream": stream or None})
    top = {"decoding": decoding and decoding.value, "segment": segment, "batch_id": batch_id, "priority": priority}
    settings = connected_settings(context, database=False)
    reader = JobReader(settings, task=task, overrides=Overrides(body, _given({**top, "deadline": ends_by})))
    waits = wait or stream or output is not None
    with Client(settings) as client, contextlib.ExitStack() as stack:
        items: Iterable[JobLine | BadLine] = _with_topic(_read(reader, file, prompt, stack), settings.kafka, high=high)
        if waits or strict:
            items = _whole(items, strict=strict)
        summary, rows = _Summary(), list[dict[str, Any]]()
        written = None if target is None else stack.enter_context(target.writing())
        if waits:
            rows += _send_and_wait(client, list(items), summary, timeout, high=high, streams=stream)
        else:
            sent = _send(client, items, summary, high=high)
            shown_ids = sent.job_ids if prompt is not None and not as_json else ()
            sys.stdout.writelines(f"{job_id}\n" for job_id in shown_ids)
        if written is not None:
            written.writelines(json_text(row) + "\n" for row in rows)
    if target is None and prompt is not None and not (stream or as_json):
        _print_texts(rows)
    _conclude(summary, waits=waits, as_json=as_json, shown=rows if waits and target is None else None)
    _exit(context, summary, waits=waits, batch_id=batch_id, output=output)


def _check_options(file: list[str], task: str | None, prompt: str | None, *, streams: bool, prints_json: bool) -> None:
    if bool(file) == (prompt is not None):
        raise typer.BadParameter("expected either --file or --prompt")
    if prompt is not None and task is None:
        raise typer.BadParameter("--prompt needs --task")
    if streams and prints_json:
        raise typer.BadParameter("--stream prints texts: expected it without --json and --output -")


def _whole(items: Iterable[JobLine | BadLine], *, strict: bool) -> list[JobLine | BadLine]:
    """Every line, read. With `strict`, raises AlphaloopError for a wrong one among them."""
    lines = list(items)
    if strict and (wrong := [line for line in lines if isinstance(line, BadLine)]):
        report_wrong(wrong)
        hint = "without --strict the correct lines are sent"
        raise AlphaloopError(f"nothing was sent: {len(wrong)} wrong", hint=hint)
    return lines


def _print_texts(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        if row.get("object") == "alphaloop.result" and (messages := Result.model_validate(row).messages):
            sys.stdout.write(f"{as_shown(as_one_text(messages))}\n")


@dataclass(slots=True)
class _Summary:
    """The outcomes of the lines."""

    sent: int = 0
    invalid: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    completion_tokens: int = 0
    wall_s: float = 0.0
    interrupted: bool = False
    job_ids: list[str] = field(default_factory=list)  #: of the jobs sent, in the order of their lines
    without_result: list[str] = field(default_factory=list)  #: of them, after a wait

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens over the time from the first job sent to the last result read."""
        return self.completion_tokens / self.wall_s if self.completion_tokens and self.wall_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "sent": self.sent,
            "invalid": self.invalid,
            **self.by_status,
            "job_ids": self.job_ids,
            "completion_tokens": self.completion_tokens,
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": self.tokens_per_s,
        }


def _with_topic(items: Iterable[JobLine | BadLine], kafka: KafkaSettings, *, high: bool) -> Iterator[JobLine | BadLine]:
    """The lines; if they shall go first, those of a task without a topic for such jobs are wrong."""
    if not high:
        yield from items
        return
    existing = frozenset(list_topics(kafka))
    for item in items:
        if isinstance(item, JobLine) and high_topic(item.job.task) not in existing:
            yield BadLine(item.where, no_high_topic(item.job.task))
        else:
            yield item


def _send(
    client: Client, items: Iterable[JobLine | BadLine], summary: _Summary, *, high: bool, stream: bool = False
) -> Batch:
    """Send lines as they are read, so that a file need not fit into memory; wrong ones are reported at the end."""
    wrong: list[BadLine] = []

    def jobs() -> Iterator[Job]:
        for item in items:
            if isinstance(item, BadLine):
                wrong.append(item)
            else:
                summary.sent += 1
                summary.job_ids.append(item.job.job_id)
                yield item.job

    try:
        return client.submit(jobs(), high=high, stream=stream)
    finally:
        summary.invalid = len(wrong)
        report_wrong(wrong)


def _send_and_wait(
    client: Client,
    items: Sequence[JobLine | BadLine],
    summary: _Summary,
    timeout_s: float,
    *,
    high: bool,
    streams: bool = False,
) -> Iterator[dict[str, Any]]:
    """Send, wait, and return one row for each line, in its order. With `streams`, texts are printed as they grow."""
    by_id = {item.job.job_id: item for item in items if isinstance(item, JobLine)}
    results: dict[str, Result] = {}
    texts = {job_id: PrintedText(job_id, is_one=len(by_id) == 1) for job_id in by_id} if streams else {}
    if by_id:
        client.sent_before(())  # connects, which is no part of the time
    started = time.monotonic()
    try:
        batch = _send(client, items, summary, high=high, stream=streams)
        arriving: Iterator[Piece | Result] = client.results(batch, timeout_s=timeout_s)
        if streams:
            arriving = client.stream(batch, timeout_s=timeout_s)
        with progress(is_shown=not streams) as bar:
            shown = bar.add_task("results", total=len(by_id), note="")
            for arrived in arriving:
                if isinstance(arrived, Piece):
                    texts[arrived.job_id].add(arrived)
                    continue
                job_id = arrived.sent_job_id
                results[job_id] = _named_in_line(arrived, by_id[job_id])
                if streams:
                    if arrived.messages:
                        texts[job_id].show(as_one_text(arrived.messages), is_end=True)
                    texts[job_id].end()
                summary.wall_s = time.monotonic() - started
                bar.update(shown, advance=1, note=counts(Counter(result.status.value for result in results.values())))
    except (ResultsMissing, KeyboardInterrupt) as error:  # the results so far are still written
        summary.interrupted = isinstance(error, KeyboardInterrupt)
    finally:
        for text in texts.values():
            text.end()
    summary.without_result = [job_id for job_id in dict.fromkeys(summary.job_ids) if job_id not in results]
    failed = ((arrived, why) for arrived in results.values() if (why := reason_of(arrived)) is not None)
    _note_first(
        [f"{arrived.sent_job_id}: {arrived.status.value}, {why}" for arrived, why in failed], "jobs without a text"
    )
    return _rows(items, results, summary)


def _rows(
    items: Sequence[JobLine | BadLine], results: Mapping[str, Result], summary: _Summary
) -> Iterator[dict[str, Any]]:
    for item in items:
        if isinstance(item, BadLine):
            named = {"code": item.error.code, "message": item.error.message, "field": item.error.field}
            yield {"line": item.where, "status": "invalid", "error": _given(named)}
            continue
        end = results.get(item.job.job_id)
        summary.by_status["missing" if end is None else end.status.value] += 1
        if end is not None and end.usage:
            summary.completion_tokens += end.usage.completion_tokens
        yield row_of(item.job, end)


def _named_in_line(result: Result, line: JobLine) -> Result:
    """The result with its error's field named as in the line: the message has the body that was read from it."""
    if result.error is None:
        return result
    error = result.error.model_copy(update={"field": line.named_in_line(result.error.field)})
    return result.model_copy(update={"error": error})


def report_wrong(wrong: Sequence[BadLine]) -> None:
    """Print the place and the error of every wrong line to standard error."""
    lines = []
    for item in wrong:
        where = f"{item.where}: {item.error.field}" if item.error.field else item.where
        lines.append(f"{where}: {item.error.message}" + (f" ({item.error.hint})" if item.error.hint else ""))
    _note_first(lines, "wrong lines")


def _note_first(lines: Sequence[str], what: str) -> None:
    for line in lines[:_MAX_SHOWN]:
        note(one_line(line))
    if len(lines) > _MAX_SHOWN:
        note(f"… and {len(lines) - _MAX_SHOWN} more {what}")


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


def _conclude(summary: _Summary, *, waits: bool, as_json: bool, shown: list[dict[str, Any]] | None) -> None:
    summary_text = f"{summary.sent} sent" + (f", {summary.invalid} wrong" if summary.invalid else "")
    if waits and summary.sent:
        summary_text += (
            f"; {counts(summary.by_status)}; {how_many(summary.completion_tokens, 'token')} in {summary.wall_s:.1f} s, "
            f"{rate(summary.tokens_per_s)} tokens/s"
        )
    note(summary_text)
    if as_json:
        print_json({**summary.as_json(), **({} if shown is None else {"results": shown})})


def _exit(context: typer.Context, summary: _Summary, *, waits: bool, batch_id: str | None, output: Path | None) -> None:
    if missing := summary.without_result:
        results = None if output is None or not output.is_file() else output
        again = wait_again(global_options(context), missing, batch_id=batch_id, file=results)
        if not summary.interrupted:
            raise AlphaloopError(
                f"{how_many(len(missing), 'job')} had no result within the timeout",
                hint=f"they go on if a worker runs, which `alphaloop status` shows; wait again: {again}",
            )
        say_they_go_on(len(missing), again)
    if summary.interrupted:
        raise typer.Exit(130)
    bad = summary.invalid + sum(n for status, n in summary.by_status.items() if status != "succeeded")
    if bad or (waits and not summary.sent):
        raise typer.Exit(1)
