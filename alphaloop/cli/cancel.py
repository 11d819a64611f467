"""`alphaloop cancel`: a request on the control topic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import typer

from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, ensure_topics
from alphaloop.settings import KafkaSettings

#: Far fewer than a broker takes, so that many cancellations are given time.
_CANCELLED_PER_S: Final = 1000
EXAMPLE: Final = "alphaloop cancel 5f0c6f9d2b3e4a0f9a7f4f4e6c9a1b2d"


def cancel(
    context: typer.Context,
    job_id: list[str] = typer.Argument(help="The jobs to cancel."),
) -> None:
    """Ask the workers to cancel jobs. A job that has ended keeps its outcome; any other is reported as cancelled."""
    request_cancellation(connected_settings(context, database=False).kafka, job_id)
    note(f"asked to cancel {len(job_id)} job{'s' if len(job_id) > 1 else ''}; the answer is the job's result")


def request_cancellation(kafka: KafkaSettings, job_ids: Sequence[str]) -> None:
    """Send one request a job, and wait until the broker has them all. Raises BrokerError."""
    ensure_topics(kafka, [])
    producer = Producer(kafka, client_id="alphaloop-cancel")
    try:
        for job_id in job_ids:
            value = json.dumps({"action": "cancel", "job_id": job_id}).encode()
            producer.send(CONTROL, key=job_id.encode(), value=value)
        producer.flush(max(kafka.request_timeout_s, len(job_ids) / _CANCELLED_PER_S))
    finally:
        producer.close()
