"""`alphaloop cancel`: a request on the control topic."""

from __future__ import annotations

import json
from typing import Final

import typer

from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, ensure_topics

EXAMPLE: Final = "alphaloop cancel 5f0c6f9d2b3e4a0f9a7f4f4e6c9a1b2d"


def cancel(
    context: typer.Context,
    job_id: list[str] = typer.Argument(help="The jobs to cancel."),
) -> None:
    """Ask the workers to cancel jobs. A job that has ended keeps its outcome; any other is reported as cancelled."""
    kafka = connected_settings(context, database=False).kafka
    ensure_topics(kafka, [])
    producer = Producer(kafka, client_id="alphaloop-cancel")
    try:
        for identifier in job_id:
            value = json.dumps({"action": "cancel", "job_id": identifier}).encode()
            producer.send(CONTROL, key=identifier.encode(), value=value)
        producer.flush(kafka.request_timeout_s)
    finally:
        producer.close()
    note(f"asked to cancel {len(job_id)} job{'s' if len(job_id) > 1 else ''}; the answer is the job's result")
