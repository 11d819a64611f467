"""How many messages the workers have not finished, by task."""

from __future__ import annotations

import contextlib

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import list_topics
from alphaloop.messages.topics import jobs_topic, task_of
from alphaloop.settings import KafkaSettings


def backlog(kafka: KafkaSettings) -> dict[str, int]:
    """Messages between the group's committed offset and the end of each task's topic: waiting or being decoded.

    Asks for the group's offsets without joining it. Raises BrokerError.
    """
    tasks = [task for topic in list_topics(kafka) if (task := task_of(topic)) is not None]
    if not tasks:
        return {}
    waiting = dict.fromkeys(tasks, 0)
    with contextlib.closing(Consumer(kafka, group_id=kafka.group_id, client_id="alphaloop-status")) as consumer:
        consumer.assign_from([jobs_topic(task) for task in tasks], at="latest")
        committed = consumer.committed(consumer.assignment())
        for partition, offset in committed.items():
            low, high = consumer.watermarks(partition)
            waiting[task_of(partition.topic) or ""] += high - max(low, offset if offset is not None else low)
    return waiting
