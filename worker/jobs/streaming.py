"""Tokens while they are decoded, on the `tokens` topic: OpenAI's chat.completion.chunk, one a delta."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from alphaloop.kafka.topics import TOKENS
from worker.engine import Step


class Sender(Protocol):
    """What is needed of alphaloop.kafka.producer.Producer."""

    def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None: ...
    def flush(self, timeout_s: float) -> None: ...


class TokenStream:
    """Streams some jobs of one batch.

    Headers `job_id`, `attempt` and `seq` order the chunks, `final` marks the last one; a reader drops chunks of a lower
    attempt and repeats of a seq. Chunks are not waited for: the result that follows holds the whole text.
    """

    def __init__(self, sender: Sender, attempts: Mapping[str, int]) -> None:
        self._sender = sender
        self._attempts = attempts
        self._next_seq = dict.fromkeys(attempts, 0)

    def send(self, step: Step) -> None:
        """The deltas of one step, and the end of what finished in it."""
        for delta in step.deltas:
            if delta.job_id in self._attempts:
                self._send_chunk(delta.job_id, delta.text, None)
        for generation in step.finished:
            if generation.job_id in self._attempts:
                self._send_chunk(generation.job_id, "", generation.finish_reason)

    def _send_chunk(self, job_id: str, text: str, finish_reason: str | None) -> None:
        seq = self._next_seq[job_id]
        self._next_seq[job_id] = seq + 1
        choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}
        chunk = {"id": job_id, "object": "chat.completion.chunk", "choices": [choice]}
        headers = {
            "job_id": job_id,
            "attempt": self._attempts[job_id],
            "seq": seq,
            "final": int(finish_reason is not None),
        }
        self._sender.send(
            TOKENS,
            key=job_id.encode(),
            value=json.dumps(chunk, ensure_ascii=False).encode(),
            headers=tuple((name, str(value).encode()) for name, value in headers.items()),
        )
