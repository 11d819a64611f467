"""The messages that the workers have not finished: how many by task, and which jobs they are."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.records import Record, TopicPartition
from alphaloop.kafka.topics import cluster_id, list_topics
from alphaloop.messages import Origin, derived_job_id
from alphaloop.messages.topics import JOBS_PATTERN
from alphaloop.settings import KafkaSettings

#: The longest that a command reads a backlog in search of jobs.
SEARCH_S: Final = 20.0
_POLL_S: Final = 0.2
#: A partition that gives nothing for so long ends in messages that a reader does not see, as markers of transactions.
_QUIET_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a job that lies before the end of its topic and that no worker has finished."""

    job_id: str
    batch_id: str | None
    task: str
    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None  #: when it was sent, by the broker's clock
    num_before: int  #: unfinished messages before it in its partition


@dataclass(frozen=True, slots=True)
class Search:
    """What was found, and whether every unfinished message was read."""

    messages: tuple[Message, ...]
    is_complete: bool


def backlog(kafka: KafkaSettings) -> dict[str, int]:
    """Messages between the group's committed offset and the end of each task's topics: waiting or being decoded.

    The task's high lane and its jobs that wait to be tried again count too.

    Asks for the group's offsets without joining it. Raises BrokerError.
    """
    topics = _topics(kafka)
    waiting = {_task_of(topic): 0 for topic in topics}
    if not topics:
        return waiting
    with _reader(kafka) as consumer:
        for partition, (first, end) in _unfinished(consumer, topics).items():
            waiting[_task_of(partition.topic)] += end - first
    return waiting


def oldest(kafka: KafkaSettings) -> dict[str, float]:
    """By task, how many seconds ago the first message that no worker has finished was sent. Raises BrokerError.

    One message of each partition is read.
    """
    topics, found = _topics(kafka), dict[str, float]()
    if not topics:
        return found
    with _reader(kafka) as consumer:
        for record in _read(consumer, {at: (first, first + 1) for at, (first, _) in _left(consumer, topics).items()}):
            if record is not None and record.timestamp_ms is not None:
                task, age_s = _task_of(record.topic), time.time() - record.timestamp_ms / 1000
                found[task] = max(age_s, found.get(task, 0.0))
    return found


def search(
    kafka: KafkaSettings,
    is_wanted: Callable[[str, str | None], bool],
    *,
    num: int | None = None,
    limit_s: float = SEARCH_S,
) -> Search:
    """The unfinished messages whose job_id and batch_id are wanted; ends when `num` of them are found.

    Reads every unfinished message, for at most `limit_s`, because Kafka finds no message by its key. Raises
    BrokerError.
    """
    topics, found = _topics(kafka), list[Message]()
    if not topics:
        return Search((), is_complete=True)
    cluster, deadline = cluster_id(kafka), time.monotonic() + limit_s
    with _reader(kafka) as consumer:
        left = _left(consumer, topics)
        for record in _read(consumer, left):
            if record is None:
                if time.monotonic() >= deadline:
                    return Search(tuple(found), is_complete=False)
                continue
            job_id, batch_id = _named(record, cluster)
            if is_wanted(job_id, batch_id):
                num_before = record.offset - left[record.topic_partition][0]
                place = (record.topic, record.partition, record.offset, record.timestamp_ms)
                found.append(Message(job_id, batch_id, _task_of(record.topic), *place, num_before))
            if len(found) == num:
                break
            if time.monotonic() >= deadline:
                return Search(tuple(found), is_complete=False)
    return Search(tuple(found), is_complete=True)


def _topics(kafka: KafkaSettings) -> list[str]:
    return [topic for topic in list_topics(kafka) if re.search(JOBS_PATTERN, topic)]


def _reader(kafka: KafkaSettings) -> contextlib.closing[Consumer]:
    # The workers' group, whose offsets are asked for and never joined or committed to.
    return contextlib.closing(Consumer(kafka, group_id=kafka.group_id, client_id="alphaloop-status"))


def _unfinished(consumer: Consumer, topics: list[str]) -> dict[TopicPartition, tuple[int, int]]:
    """The first unfinished offset of each partition, and its end."""
    ends = consumer.assign_from(topics, at="latest")
    found = {}
    for partition, offset in consumer.committed(ends).items():
        low, high = ends[partition]
        found[partition] = max(low, offset if offset is not None else low), high
    return found


def _left(consumer: Consumer, topics: list[str]) -> dict[TopicPartition, tuple[int, int]]:
    """Those of the partitions that have an unfinished message."""
    return {at: (first, end) for at, (first, end) in _unfinished(consumer, topics).items() if end > first}


def _read(consumer: Consumer, wanted: dict[TopicPartition, tuple[int, int]]) -> Iterator[Record | None]:
    """The records from the first offset of each partition to its end; None where none has come for a moment."""
    unread = {partition: end for partition, (_, end) in wanted.items()}
    consumer.assign_at({partition: first for partition, (first, _) in wanted.items()})
    quiet_until = time.monotonic() + _QUIET_S
    while unread and time.monotonic() < quiet_until:
        record = consumer.poll(_POLL_S)
        if record is None:
            yield None
            continue
        quiet_until = time.monotonic() + _QUIET_S
        end = unread.get(record.topic_partition)
        if end is not None and record.offset < end:
            yield record
        if end is not None and record.offset + 1 >= end:
            del unread[record.topic_partition]


def _named(record: Record, cluster: str) -> tuple[str, str | None]:
    """The job_id that a worker gives the message, and its batch_id."""
    try:
        fields: Any = json.loads(record.value or b"")
    except (ValueError, RecursionError):
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    origin = Origin(cluster, record.topic, record.partition, record.offset, record.timestamp_ms)
    job_id, batch_id = fields.get("job_id"), fields.get("batch_id")
    if not isinstance(job_id, str):
        job_id = derived_job_id(origin, record.value or b"")
    return job_id, batch_id if isinstance(batch_id, str) else None


def _task_of(topic: str) -> str:
    return topic.split(".")[1]
