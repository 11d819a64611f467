"""Lines of jobs onto Kafka, and one row a line back."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from alphaloop.claim_check.store import ContentStore, by_reference, with_text
from alphaloop.cli.screen import note, progress
from alphaloop.cli.tail import GrowingText
from alphaloop.errors import ContentError, MessageError
from alphaloop.job_lines import BadLine, JobLine
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import Job, Result, encode_job
from alphaloop.outcomes.reading import Outcome, OutcomeReader, RefusedJob, reason_of, status_of
from alphaloop.settings import KafkaSettings
from alphaloop.wording import counts, one_line

TopicOf: TypeAlias = Callable[[str], str]

_MAX_SHOWN: Final = 20
_FLUSH_S: Final = 120.0


@dataclass(slots=True)
class Summary:
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
        counts_by_status = {"sent": self.sent, "invalid": self.invalid, **self.by_status}
        return {
            **counts_by_status,
            "job_ids": self.job_ids,
            "completion_tokens": self.completion_tokens,
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": self.tokens_per_s,
        }


def carried(
    items: Iterable[JobLine | BadLine], max_bytes: int, contents: ContentStore | None
) -> Iterator[JobLine | BadLine]:
    """The lines as they are sent: a prompt that is too large for a message of `max_bytes` lies in the store."""
    for item in items:
        yield item if isinstance(item, BadLine) else replace(item, job=by_reference(item.job, max_bytes, contents))


def send(
    kafka: KafkaSettings, items: Iterable[JobLine | BadLine], summary: Summary, *, topic_of: TopicOf, show_id: bool
) -> None:
    """Send lines as they are read, so that a file need not fit into memory. Connects at the first good line.

    `topic_of` names the topic for jobs of a task.
    """
    producer: Producer | None = None
    ready: set[str] = set()
    wrong: list[BadLine] = []
    try:
        for item in items:
            if isinstance(item, BadLine):
                wrong.append(item)
                continue
            producer = producer or Producer(kafka, client_id="alphaloop-enqueue")
            if item.job.task not in ready:
                ensure_topics(kafka, [item.job.task])
                ready.add(item.job.task)
            _produce(producer, topic_of, item)
            summary.sent += 1
            summary.job_ids.append(item.job.job_id)
            if show_id:
                sys.stdout.write(f"{item.job.job_id}\n")
        if producer is not None:
            producer.flush(_FLUSH_S)
    finally:
        if producer is not None:
            producer.close()
        summary.invalid = len(wrong)
        report_wrong(wrong)


def send_and_wait(
    kafka: KafkaSettings,
    items: Sequence[JobLine | BadLine],
    summary: Summary,
    timeout_s: float,
    *,
    topic_of: TopicOf,
    contents: ContentStore | None = None,
    streams: bool = False,
) -> Iterator[dict[str, Any]]:
    """Send, wait, and yield one row for each line, in its order; texts that lie in `contents` are in the rows.

    With `streams`, texts are printed while they are decoded.
    """
    lines = [item for item in items if isinstance(item, JobLine)]
    wrong = [item for item in items if isinstance(item, BadLine)]
    report_wrong(wrong)
    summary.invalid, summary.sent = len(wrong), len(lines)
    summary.job_ids = [line.job.job_id for line in lines]
    outcomes: dict[str, Outcome] = {}
    if lines:
        outcomes = _outcomes(kafka, lines, summary, timeout_s, topic_of, streams=streams)
    summary.without_result = [job_id for job_id in dict.fromkeys(summary.job_ids) if job_id not in outcomes]
    report_failed(outcomes.values())
    for item in items:
        if isinstance(item, BadLine):
            yield _wrong_row(item)
            continue
        outcome = outcomes.get(item.job.job_id)
        summary.by_status["missing" if outcome is None else status_of(outcome)] += 1
        if isinstance(outcome, Result) and outcome.usage:
            summary.completion_tokens += outcome.usage.completion_tokens
        yield row_of(item.job, texts_of(outcome, contents))


def _outcomes(
    kafka: KafkaSettings,
    lines: Sequence[JobLine],
    summary: Summary,
    timeout_s: float,
    topic_of: TopicOf,
    *,
    streams: bool,
) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    by_id = {line.job.job_id: line for line in lines}
    texts = {job_id: GrowingText(job_id, is_one=len(by_id) == 1) for job_id in by_id} if streams else {}
    on_text = (lambda job_id, text: texts[job_id].show(text)) if streams else None
    tasks = {line.job.task for line in lines}
    producer = Producer(kafka, client_id="alphaloop-enqueue")
    try:
        with OutcomeReader(kafka, tasks, on_text=on_text) as reader, progress(is_shown=not streams) as bar:
            shown = bar.add_task("results", total=len(by_id), note="")
            started = time.monotonic()
            for line in lines:
                _produce(producer, topic_of, line)
            producer.flush(_FLUSH_S)
            for outcome in reader.outcomes(by_id, timeout_s=timeout_s):
                outcomes[outcome.job_id] = _named_in_line(outcome, by_id[outcome.job_id])
                if text := texts.get(outcome.job_id):
                    text.end(outcome.text if isinstance(outcome, Result) else None)
                summary.wall_s = time.monotonic() - started
                bar.update(shown, advance=1, note=counts(Counter(map(status_of, outcomes.values()))))
    except KeyboardInterrupt:
        summary.interrupted = True  # the results so far are still written
    finally:
        producer.close()
        for text in texts.values():
            text.end()
    return outcomes


def _named_in_line(outcome: Outcome, line: JobLine) -> Outcome:
    """The outcome with its error's field named as in the line: the message has the body that was read from it."""
    if isinstance(outcome, RefusedJob):
        return replace(outcome, field=line.named_in_line(outcome.field))
    if outcome.error is None:
        return outcome
    error = outcome.error.model_copy(update={"field": line.named_in_line(outcome.error.field)})
    return outcome.model_copy(update={"error": error})


def _produce(producer: Producer, topic_of: TopicOf, line: JobLine) -> None:
    producer.send(topic_of(line.job.task), key=line.job.job_id.encode(), value=encode_job(line.job))


def _wrong_row(item: BadLine) -> dict[str, Any]:
    error = {"code": item.error.code, "message": item.error.message, "field": item.error.field}
    return {"line": item.where, "status": "invalid", "error": {k: v for k, v in error.items() if v is not None}}


def texts_of(outcome: Outcome | None, contents: ContentStore | None) -> Outcome | None:
    """The outcome with its text. One whose text cannot be read keeps the reference."""
    if not isinstance(outcome, Result):
        return outcome
    try:
        return with_text(outcome, contents)
    except (ContentError, MessageError) as error:
        note(f"{outcome.job_id}: {error.message}")
        return outcome


def row_of(job: Job | str, outcome: Outcome | None) -> dict[str, Any]:
    """What became of a job, as one object; of a job that is known by its job_id alone, less."""
    if isinstance(outcome, Result):
        found: dict[str, Any] = json.loads(outcome.encode())
        return found
    named: dict[str, Any] = {"job_id": job}
    if isinstance(job, Job):
        named = {"job_id": job.job_id, "custom_id": job.custom_id, "task": job.task}
    return {**named, **(outcome.as_json() if outcome is not None else {"status": "missing"})}


def report_failed(outcomes: Iterable[Outcome]) -> None:
    """Print why there is no text, for each job that has none, to standard error."""
    failed = [(outcome, why) for outcome in outcomes if (why := reason_of(outcome)) is not None]
    for outcome, why in failed[:_MAX_SHOWN]:
        note(one_line(f"{outcome.job_id}: {status_of(outcome)}, {why}"))
    if len(failed) > _MAX_SHOWN:
        note(f"… and {len(failed) - _MAX_SHOWN} more jobs without a text")


def report_wrong(wrong: Sequence[BadLine]) -> None:
    """Print the place and the error of every wrong line to standard error."""
    for item in wrong[:_MAX_SHOWN]:
        where = f"{item.where}: {item.error.field}" if item.error.field else item.where
        note(one_line(f"{where}: {item.error.message}" + (f" ({item.error.hint})" if item.error.hint else "")))
    if len(wrong) > _MAX_SHOWN:
        note(f"… and {len(wrong) - _MAX_SHOWN} more wrong lines")
