"""`alphaloop dlq list`: messages that could not become jobs, and why."""

from __future__ import annotations

import contextlib
import heapq
import time
import uuid
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final

import typer

from alphaloop.cli.options import connected_settings
from alphaloop.cli.outcomes import dead_letter_reason
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.records import Record
from alphaloop.kafka.topics import list_topics
from alphaloop.messages.topics import dlq_topic, jobs_topic, task_of
from alphaloop.settings import KafkaSettings

EXAMPLE: Final = "alphaloop dlq list --task code --limit 20"

_SUFFIX: Final = dlq_topic("")
_SHOWN_CHARS: Final = 200


def list_letters(
    context: typer.Context,
    task: str | None = typer.Option(None, help="Only this task's."),
    limit: int = typer.Option(50, min=1, help="Number of dead letters to show, newest last."),
    show_value: bool = typer.Option(
        False, "--show-value", help="Show the start of the message too: it may hold a prompt."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """List the newest dead letters: their times, topics and reasons."""
    kafka = connected_settings(context, database=False).kafka
    letters = _newest(kafka, task, limit, show_value=show_value)
    if as_json:
        print_json(letters)
        return
    if not letters:
        note("no dead letters")
        return
    shown = table("when", "from", "code", "field", "message", *(["value"] if show_value else []))
    for letter in letters:
        origin = f"{letter['topic']}[{letter['partition']}]@{letter['offset']}"
        cells = [letter["when"] or "-", origin, letter["code"], letter["field"] or "-", letter["message"]]
        shown.add_row(*cells, *([letter["value"] or ""] if show_value else []))
    out().print(shown)


def letter_as_json(record: Record, *, show_value: bool) -> dict[str, Any]:
    """One dead letter, with its size and, with `show_value`, its value."""
    reason = dead_letter_reason(record)
    when = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC) if record.timestamp_ms is not None else None
    letter: dict[str, Any] = {
        "when": when.strftime("%Y-%m-%d %H:%M:%S") if when else None,
        "topic": reason.get("topic", record.topic.removesuffix(_SUFFIX)),
        "partition": reason.get("partition", "?"),
        "offset": reason.get("offset", "?"),
        "code": reason.get("exception", "unknown"),
        "field": reason.get("field"),
        "message": reason.get("message", "").split("\nhint: ")[0],
        "size_bytes": len(record.value or b""),
    }
    if show_value:
        letter["value"] = (record.value or b"")[: 4 * _SHOWN_CHARS].decode("utf-8", "replace")[:_SHOWN_CHARS]
    return letter


def _newest(kafka: KafkaSettings, task: str | None, limit: int, *, show_value: bool) -> list[dict[str, Any]]:
    """The newest `limit` letters, oldest first. No more than `limit` are ever held, and none of their values."""
    wanted = None if task is None else jobs_topic(task)
    topics = [
        topic
        for topic in list_topics(kafka)
        if topic.endswith(_SUFFIX) and task_of(source := topic.removesuffix(_SUFFIX)) and wanted in (None, source)
    ]
    if not topics:
        return []
    consumer = Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-dlq")
    newest: list[tuple[tuple[int, str, int, int], dict[str, Any]]] = []  # a heap, its oldest letter first
    with contextlib.closing(consumer):
        consumer.assign_from(topics, at="earliest", newest=limit)
        ends = {tp: consumer.watermarks(tp) for tp in consumer.assignment()}
        unread = {tp: high for tp, (low, high) in ends.items() if high > low}
        deadline = time.monotonic() + kafka.request_timeout_s
        while unread and time.monotonic() < deadline:
            record = consumer.poll(0.2)
            if record is None:
                continue
            deadline = time.monotonic() + kafka.request_timeout_s
            keep = heapq.heappush if len(newest) < limit else heapq.heappushpop
            age = (record.timestamp_ms or 0, record.topic, record.partition, record.offset)
            keep(newest, (age, letter_as_json(record, show_value=show_value)))
            if record.offset + 1 >= unread.get(record.topic_partition, 0):
                unread.pop(record.topic_partition, None)
    return [letter for _, letter in sorted(newest, key=itemgetter(0))]
