"""Streams of a real model on a real broker: the deltas together are the result's text, whatever the tokens are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from alphaloop.kafka.topics import TOKENS
from alphaloop.messages import StreamReaders, read_chunk
from alphaloop.settings import Settings
from tests.fixtures.worker import Client, headers_of, running_worker

if TYPE_CHECKING:
    from worker.decoding.engine import TransformersEngine

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS = 24
E_ACUTE = "é"


def test_the_deltas_of_each_job_are_its_text(
    worker_settings: Settings, tiny_engine: Callable[..., TransformersEngine], tiny_tokenizer: Any
) -> None:
    """Bytes of é are tokens of their own, and likely ones, so that many characters are split and many are broken."""
    halves = tiny_tokenizer(E_ACUTE)["input_ids"]
    assert len(halves) == 2
    jobs = [
        {
            "job_id": f"job-{number}",
            "stream": True,
            "prompt": f"line {number} of a text with {E_ACUTE}",
            "max_tokens": 48,
            "temperature": 1.0,
            "seed": number,
            "decoding": ("vanilla", "speculative")[number % 2],
            "logit_bias": {str(token): 5 for token in halves} if number % 3 else {},
            "stop": ([], [E_ACUTE * 3, "ae"], ["e", "t"], [f"{E_ACUTE}\ufffd"])[number % 4],
        }
        for number in range(NUM_JOBS)
    ]
    quick = {"calibration_budget_s": 0.0}
    settings = worker_settings.model_copy(update={"worker": worker_settings.worker.model_copy(update=quick)})
    client = Client(settings)
    with running_worker(settings, tiny_engine(num_slots=4, context_length=256)):
        client.send("code", [json.dumps(job).encode() for job in jobs])
        results = {result.job_id: result for result in client.results(NUM_JOBS)}
        chunks = client.read([TOKENS], lambda r: sum(headers_of(x)["final"] == "1" for x in r) == NUM_JOBS)
    readers = StreamReaders(results)
    for record in chunks:
        readers.take(read_chunk(record.value, record.headers))
    for job_id, result in results.items():
        end = readers[job_id].end
        assert end is not None
        assert (readers[job_id].text, end.finish_reason) == (result.text, result.finish_reason)
    texts = [result.text or "" for result in results.values()]
    assert any(E_ACUTE in text for text in texts), "no character was split over tokens"
    assert any("\ufffd" in text for text in texts), "no character was broken"
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}
    assert any((result.num_chunks or 0) > 10 for result in results.values())
