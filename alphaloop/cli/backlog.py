"""How many messages the workers have not finished, by task."""

from __future__ import annotations

import contextlib
import re

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import list_topics
from alphaloop.messages.topics import JOBS_PATTERN
from alphaloop.settings import KafkaSettings


def backlog(kafka: KafkaSettings) -> dict[str, int]:
    """Messages between the group's committed offset and the end of each task's topics: waiting or being decoded.

    The task's high lane and its jobs that wait to be tried again count too.

    Asks for the group's offsets without joining it. Raises BrokerError.
    """
    tasks = {topic: _task_of(topic) for topic in list_topics(kafka) if re.search(JOBS_PATTERN, topic)}
    if not tasks:
        return {}
    waiting = dict.fromkeys(tasks.values(), 0)
    with contextlib.closing(Consumer(kafka, group_id=kafka.group_id, client_id="alphaloop-status")) as consumer:
        consumer.assign_from(list(tasks), at="latest")
        committed = consumer.committed(consumer.assignment())
        for partition, offset in committed.items():
            low, high = consumer.watermarks(partition)
            waiting[tasks[partition.topic]] += high - max(low, offset if offset is not None else low)
    return waiting


def _task_of(topic: str) -> str:
    return topic.split(".")[1]
