"""Everything the worker says on Kafka: results, dead letters, token streams. Nothing is done before it is acknowledged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import DeadLetter
from alphaloop.store.outbox import OutboxMessage
from worker.claiming import ClaimedJob
from worker.engine import Step

FLUSH_S: Final = 30.0


class Sender(Protocol):
    """What is needed of alphaloop.kafka.producer.Producer."""

    def send(
        self, topic: str, *, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]] = (),
    ) -> None: ...  # fmt: skip
    def flush(self, timeout_s: float) -> None: ...


class Publisher:
    """Sends and waits for the broker's acknowledgement; raises DeliveryFailed or FatalBrokerError."""

    def __init__(self, sender: Sender, *, ensure_dead_letter_topic: Callable[[str], None]) -> None:
        self._sender = sender
        self._ensure_dead_letter_topic = ensure_dead_letter_topic
        self._ensured: set[str] = set()

    def refuse(self, letters: Iterable[DeadLetter]) -> None:
        """Dead letters, to the dead-letter topic of where they came from."""
        for letter in letters:
            if letter.topic not in self._ensured:
                self._ensure_dead_letter_topic(letter.topic.removesuffix(".dlq"))
                self._ensured.add(letter.topic)
            self._sender.send(letter.topic, key=letter.key, value=letter.value, headers=tuple(letter.headers))
        self._sender.flush(FLUSH_S)

    def emit(self, messages: Iterable[OutboxMessage]) -> None:
        """Recorded results, as they were recorded."""
        for message in messages:
            headers = tuple((name, value.encode()) for name, value in message.headers.items())
            self._sender.send(message.topic, key=message.key, value=message.value, headers=headers)
        self._sender.flush(FLUSH_S)

    def answer_again(self, outcomes: Iterable[tuple[str, bytes]]) -> None:
        """Outcomes recorded earlier, by job_id, byte for byte."""
        for job_id, outcome in outcomes:
            self._sender.send(
                RESULTS, key=job_id.encode(), value=outcome, headers=(("content-type", b"application/json"),)
            )
        self._sender.flush(FLUSH_S)

    def token_stream(self, batch: Sequence[ClaimedJob]) -> Callable[[Step], None]:
        """A listener for a batch's steps that streams the jobs which asked for it."""
        streamed = {c.job_id: c.attempt for c in batch if c.ready.job.body.stream}
        return lambda step: self._stream(step, streamed)

    def _stream(self, step: Step, attempts: Mapping[str, int]) -> None:
        """OpenAI's chat.completion.chunk, one a delta; readers drop a lower attempt or a repeated seq.

        Chunks are not waited for: the result that follows holds the whole text.
        """
        for delta in step.deltas:
            if delta.job_id in attempts:
                self._chunk(delta.job_id, attempts[delta.job_id], str(delta.index), delta.text, None)
        for generation in step.finished:
            if generation.job_id in attempts:
                self._chunk(generation.job_id, attempts[generation.job_id], "final", "", generation.finish_reason)

    def _chunk(self, job_id: str, attempt: int, seq: str, text: str, finish_reason: str | None) -> None:
        choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}
        value = json.dumps({"id": job_id, "object": "chat.completion.chunk", "choices": [choice]}, ensure_ascii=False)
        headers = (("job_id", job_id.encode()), ("attempt", str(attempt).encode()), ("seq", seq.encode()))
        self._sender.send(TOKENS, key=job_id.encode(), value=value.encode(), headers=headers)
