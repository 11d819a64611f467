"""Which jobs were refused: found by reading dead letters, because a refused job has no row in the database."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import list_topics
from alphaloop.messages.topics import dlq_topic, task_of
from alphaloop.outcomes.reading import Refusal, read_outcome
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from alphaloop.store.redrives import RedriveStore


def refusals_of(kafka: KafkaSettings, job_ids: Collection[str]) -> dict[str, Refusal]:
    """Those of the jobs that lie in a dead-letter topic now. Raises BrokerError."""
    wanted = frozenset(job_ids)
    return refusals(kafka, lambda refusal: refusal.job_id in wanted) if wanted else {}


def standing_refusals(kafka: KafkaSettings, database: Database, job_ids: Collection[str]) -> dict[str, Refusal]:
    """Those of them whose letter was not sent again: one that was waits like any other message.

    Raises BrokerError and StoreError.
    """
    found = refusals_of(kafka, job_ids)
    sent_again = RedriveStore(database).of([why.letter for why in found.values() if why.letter is not None])
    return {job_id: why for job_id, why in found.items() if why.letter not in sent_again}


def refusals(kafka: KafkaSettings, is_wanted: Callable[[Refusal], bool]) -> dict[str, Refusal]:
    """The newest wanted refusal of each job, by job_id. Raises BrokerError."""
    suffix = dlq_topic("")
    topics = [name for name in list_topics(kafka) if name.endswith(suffix) and task_of(name.removesuffix(suffix))]
    found: dict[str, Refusal] = {}
    if not topics:
        return found
    consumer = Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-batch")
    with contextlib.closing(consumer):
        ends = consumer.assign_from(topics, at="earliest")
        unread = {partition: high for partition, (low, high) in ends.items() if high > low}
        deadline = time.monotonic() + kafka.request_timeout_s
        for record in consumer.read_until(unread):
            if record is not None:
                deadline = time.monotonic() + kafka.request_timeout_s
                refusal = read_outcome(record)
                if isinstance(refusal, Refusal) and is_wanted(refusal):
                    found[refusal.job_id] = refusal
            elif time.monotonic() >= deadline:
                break
    return found
