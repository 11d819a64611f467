"""Which jobs were refused: found by reading dead letters, because a refused job has no row in the database."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Collection

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import list_topics
from alphaloop.messages.topics import dlq_topic, task_of
from alphaloop.outcomes.reading import Refusal, read_outcome
from alphaloop.settings import KafkaSettings


def refusals_of(kafka: KafkaSettings, job_ids: Collection[str]) -> dict[str, Refusal]:
    """Those of the jobs that lie in a dead-letter topic now. Raises BrokerError."""
    suffix = dlq_topic("")
    topics = [name for name in list_topics(kafka) if name.endswith(suffix) and task_of(name.removesuffix(suffix))]
    found: dict[str, Refusal] = {}
    if not topics or not job_ids:
        return found
    wanted = frozenset(job_ids)
    consumer = Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-batch")
    with contextlib.closing(consumer):
        ends = consumer.assign_from(topics, at="earliest")
        unread = {partition: high for partition, (low, high) in ends.items() if high > low}
        deadline = time.monotonic() + kafka.request_timeout_s
        for record in consumer.read_until(unread):
            if record is not None:
                deadline = time.monotonic() + kafka.request_timeout_s
                refusal = read_outcome(record)
                if isinstance(refusal, Refusal) and refusal.job_id in wanted:
                    found[refusal.job_id] = refusal
            elif time.monotonic() >= deadline:
                break
    return found
