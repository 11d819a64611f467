"""The jobs of a run: what is sent, and what has to become of each. A text is a function of its prompt."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

TASK: Final = "chat"
NUM_WORDS: Final = 4
#: In every prompt and in every text of the null engine, so that a search of the logs finds either.
PROMPT_MARK: Final = "zanzibar-prompt"
TEXT_MARK: Final = "zanzibar-text"
#: In the prompt of a job whose engine kills its process.
KILLER_MARK: Final = "this prompt kills its worker"

_STREAMED_SHARE: Final = 0.05
_DEADLINE_SHARE: Final = 0.05
#: From the start of the run. A worker whose clock is an hour ahead would let such a job expire.
_DEADLINE: Final = timedelta(minutes=50)


class Fate(StrEnum):
    """What has to become of a job."""

    SUCCEEDS = "succeeds"
    REFUSED = "refused"  #: planted poison: no job at all; it belongs in the dead-letter topic
    KILLS = "kills"  #: planted poison: every worker that decodes it dies


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A message to send. `text` is the right one; None where no text is right."""

    job_id: str
    value: bytes
    fate: Fate
    text: str | None = None
    is_streamed: bool = False


def text_of(prompt: str) -> str:
    """What the null engine answers to a prompt: NUM_WORDS words."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return " ".join([TEXT_MARK, *(digest[8 * number : 8 * number + 8] for number in range(NUM_WORDS - 1))])


def null_jobs(num_jobs: int, *, num_refused: int, num_killers: int, rng: random.Random) -> Iterator[PlannedJob]:
    """Jobs for the null engine, the poison planted at random places among them."""
    places = rng.sample(range(num_jobs), num_refused + num_killers)
    refused, killers = set(places[:num_refused]), set(places[num_refused:])
    for number in range(num_jobs):
        if number in refused:
            yield _refused(f"poison-{number:06d}", rng)
        elif number in killers:
            prompt = f"{PROMPT_MARK} {number}: {KILLER_MARK}"
            job_id = f"killer-{number:06d}"
            yield PlannedJob(job_id, _value(job_id, prompt), Fate.KILLS)
        else:
            yield _null_job(number, rng)


def _null_job(number: int, rng: random.Random) -> PlannedJob:
    job_id, prompt = f"null-{number:06d}", f"{PROMPT_MARK} {number}: {rng.getrandbits(64):016x}"
    extra: dict[str, object] = {}
    if is_streamed := rng.random() < _STREAMED_SHARE:
        extra["stream"] = True
    if rng.random() < _DEADLINE_SHARE:
        extra["deadline"] = (datetime.now(UTC) + _DEADLINE).isoformat()
    return PlannedJob(job_id, _value(job_id, prompt, extra), Fate.SUCCEEDS, text_of(prompt), is_streamed)


def _value(job_id: str, prompt: str, extra: dict[str, object] | None = None) -> bytes:
    return json.dumps({"job_id": job_id, "prompt": prompt, "max_tokens": NUM_WORDS, **(extra or {})}).encode()


def _refused(job_id: str, rng: random.Random) -> PlannedJob:
    prompt = f"{PROMPT_MARK} {job_id}"
    values = (
        b'{"prompt": "' + prompt.encode(),  # ends in the middle
        prompt.encode(),  # no JSON
        b"\xff\xfe" + prompt.encode(),  # no UTF-8
        b"",
        json.dumps({"job_id": job_id, "prompt": prompt, "max_tokens": -1}).encode(),
        json.dumps({"job_id": job_id, "prompt": prompt, "temperature": "hot"}).encode(),
        json.dumps({"job_id": job_id, "messages": [{"role": prompt, "content": prompt}]}).encode(),
        json.dumps({"job_id": job_id, "prompt": prompt, "body": {"prompt": prompt}}).encode(),
    )
    return PlannedJob(job_id, rng.choice(values), Fate.REFUSED)
