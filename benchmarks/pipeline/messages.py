"""The jobs that every contestant gets: one after the other, all alike, none the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Final

NUM_BYTES: Final = 400
_WORDS: Final = (
    "order",
    "parcel",
    "invoice",
    "shipping",
    "refund",
    "customer",
    "harbour",
    "station",
    "number",
    "morning",
    "evening",
    "window",
    "letter",
    "answer",
    "question",
    "address",
)


def jobs(num_jobs: int, *, prefix: str, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(job_id, message), each message of NUM_BYTES bytes or a few more."""
    rng = random.Random(seed)
    for number in range(num_jobs):
        job_id = f"{prefix}-{number:07d}"
        yield job_id, _message(job_id, rng)


def _message(job_id: str, rng: random.Random) -> bytes:
    text = "Summarize in one word:"
    while True:
        value = json.dumps({"job_id": job_id, "prompt": text, "max_tokens": 1}).encode()
        if len(value) >= NUM_BYTES:
            return value
        text += " " + rng.choice(_WORDS)
