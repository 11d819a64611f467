"""The messages that the workers have not finished: how many by task, and which jobs they are."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.topics import cluster_id, list_topics
from alphaloop.messages import Origin, derived_job_id, fields_of
from alphaloop.messages.topics import JOBS_PATTERN
from alphaloop.settings import KafkaSettings

#: The longest that a command reads a backlog in search of jobs.
SEARCH_S: Final = 20.0
#: Partitions with more unfinished offsets are counted by these, smaller ones by reading their messages.
_MOST_COUNTED: Final = 1000
#: The longest that messages are counted.
_COUNT_S: Final = 3.0


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


@dataclass(slots=True)
class Unfinished:
    """The messages of a task that no worker has finished: waiting or being decoded."""

    num_messages: int = 0
    oldest_s: float | None = None  #: how many seconds ago the first of them was sent
    job_ids: list[str] = field(default_factory=list)  #: of those that were read to be counted


def unfinished(kafka: KafkaSettings) -> dict[str, Unfinished]:
    """By task, the messages between the group's committed offset and the end of the task's topics.

    The task's high lane and its jobs that wait to be tried again count too, messages of open transactions do not.
    Offsets are no messages: transactions leave markers between them, and aborted messages are never read. So messages
    are read to be counted; of a partition with more than 1000 unfinished offsets only the first, and the offsets count.

    Asks for the group's offsets without joining it. Raises BrokerError.
    """
    topics = _topics(kafka)
    by_task = {_task_of(topic): Unfinished() for topic in topics}
    if not topics:
        return by_task
    cluster = cluster_id(kafka)
    with _reader(kafka) as consumer:
        counts, firsts = _counted(
            consumer,
            _left(consumer, topics),
            lambda record: by_task[_task_of(record.topic)].job_ids.append(_named(record, cluster)[0]),
        )
    for partition, num_messages in counts.items():
        of_task = by_task[_task_of(partition.topic)]
        of_task.num_messages += num_messages
        if (sent_ms := firsts.get(partition)) is not None:
            of_task.oldest_s = max(of_task.oldest_s or 0.0, time.time() - sent_ms / 1000)
    return by_task


def _counted(
    consumer: Consumer, left: dict[TopicPartition, tuple[int, int]], note: Callable[[Record], None]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int | None]]:
    """The number of messages of each partition, and when the first was sent, if any; `note` gets each that is read."""
    counts, firsts = dict.fromkeys(left, 0), dict[TopicPartition, int | None]()
    read_to = {partition: first for partition, (first, _) in left.items()}
    by_offsets = {partition for partition, (first, end) in left.items() if end - first > _MOST_COUNTED}
    deadline = time.monotonic() + _COUNT_S
    unread = _assign(consumer, left)
    for record in consumer.read_until(unread):
        if record is not None and not ((partition := record.topic_partition) in by_offsets and partition in firsts):
            firsts.setdefault(partition, record.timestamp_ms)
            counts[partition] += 1
            note(record)
            read_to[partition] = record.offset + 1
            if partition in by_offsets:
                consumer.pause([partition])
                unread.pop(partition, None)
        if time.monotonic() >= deadline:
            break
    for partition in (by_offsets & firsts.keys()) | unread.keys():
        counts[partition] += max(0, left[partition][1] - read_to[partition])
    return counts, firsts


def search(
    kafka: KafkaSettings,
    is_wanted: Callable[[str, str | None], bool],
    *,
    num: int | None = None,
) -> list[Message]:
    """The unfinished messages whose job_id and batch_id are wanted; ends when `num` of them are found.

    Reads every unfinished message, because Kafka finds no message by its key. Raises BrokerError, also where that takes
    longer than `SEARCH_S`.
    """
    topics, messages = _topics(kafka), list[Message]()
    if not topics:
        return messages
    cluster, deadline = cluster_id(kafka), time.monotonic() + SEARCH_S
    num_before = Counter[TopicPartition]()
    with _reader(kafka) as consumer:
        for record in consumer.read_through(_assign(consumer, _left(consumer, topics))):
            job_id, batch_id = _named(record, cluster)
            if is_wanted(job_id, batch_id):
                place = (record.topic, record.partition, record.offset, record.timestamp_ms)
                before = num_before[record.topic_partition]
                messages.append(Message(job_id, batch_id, _task_of(record.topic), *place, before))
            num_before[record.topic_partition] += 1
            if len(messages) == num:
                break
            if time.monotonic() >= deadline:
                raise BrokerUnavailable(f"more messages wait in Kafka than can be read through in {SEARCH_S:g} s")
    return messages


def _topics(kafka: KafkaSettings) -> list[str]:
    return [topic for topic in list_topics(kafka) if re.search(JOBS_PATTERN, topic)]


def _reader(kafka: KafkaSettings) -> contextlib.closing[Consumer]:
    # The workers' group, whose offsets are asked for and never joined or committed to.
    return contextlib.closing(Consumer(kafka, group_id=kafka.group_id, client_id="alphaloop-status"))


def _left(consumer: Consumer, topics: list[str]) -> dict[TopicPartition, tuple[int, int]]:
    """The first unfinished offset of each partition and its end, where there is one before the end."""
    bounds = consumer.bounds(topics)
    left = {}
    for partition, offset in consumer.committed(bounds).items():
        low, end = bounds[partition]
        if (first := max(low, offset or 0)) < end:
            left[partition] = first, end
    return left


def _assign(consumer: Consumer, left: dict[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
    """Begin to read these; returns where each ends."""
    consumer.assign_at({partition: first for partition, (first, _) in left.items()})
    return {partition: end for partition, (_, end) in left.items()}


def _named(record: Record, cluster: str) -> tuple[str, str | None]:
    """The job_id that a worker gives the message, and its batch_id."""
    fields = fields_of(record.value) or {}
    origin = Origin(cluster, record.topic, record.partition, record.offset, record.timestamp_ms)
    job_id, batch_id = fields.get("job_id"), fields.get("batch_id")
    if not isinstance(job_id, str):
        job_id = derived_job_id(origin, record.value or b"")
    return job_id, batch_id if isinstance(batch_id, str) else None


def _task_of(topic: str) -> str:
    return topic.split(".")[1]
