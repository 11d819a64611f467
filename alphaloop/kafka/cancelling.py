"""Requests to cancel jobs, on the control topic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, ensure_topics
from alphaloop.settings import KafkaSettings

#: Far fewer than a broker takes, so that many cancellations are given time.
_CANCELLED_PER_S: Final = 1000


def request_cancellation(kafka: KafkaSettings, job_ids: Sequence[str]) -> None:
    """Send one request a job, and wait until the broker has them all. Raises BrokerError."""
    if not job_ids:
        return
    ensure_topics(kafka, [])
    producer = Producer(kafka, client_id="alphaloop-cancel")
    try:
        for job_id in job_ids:
            value = json.dumps({"action": "cancel", "job_id": job_id}).encode()
            producer.send(CONTROL, key=job_id.encode(), value=value)
        producer.flush(max(kafka.request_timeout_s, len(job_ids) / _CANCELLED_PER_S))
    finally:
        producer.close()
