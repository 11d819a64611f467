"""Tokens while they are decoded, on the `tokens` topic: OpenAI's chat.completion.chunk, one a delta."""

from __future__ import annotations

import json

from alphaloop.kafka.topics import TOKENS
from worker.jobs.publishing import Chunk


class JobStream:
    """The chunks of one attempt of one job.

    Headers `job_id`, `attempt` and `seq` order the chunks, `final` marks the last one; a reader drops chunks of a lower
    attempt and repeats of a seq.
    """

    def __init__(self, job_id: str, attempt: int) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._next_seq = 0

    def delta(self, text: str) -> Chunk:
        """Text that one step added."""
        return self._chunk(text, None)

    def final(self, finish_reason: str) -> Chunk:
        """The end of the text."""
        return self._chunk("", finish_reason)

    def _chunk(self, text: str, finish_reason: str | None) -> Chunk:
        seq = self._next_seq
        self._next_seq += 1
        choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}
        chunk = {"id": self._job_id, "object": "chat.completion.chunk", "choices": [choice]}
        headers = {
            "job_id": self._job_id,
            "attempt": self._attempt,
            "seq": seq,
            "final": int(finish_reason is not None),
        }
        return Chunk(
            key=self._job_id.encode(),
            value=json.dumps(chunk, ensure_ascii=False).encode(),
            headers=tuple((name, str(value).encode()) for name, value in headers.items()),
            topic=TOKENS,
        )
