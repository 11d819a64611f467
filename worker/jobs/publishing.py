"""Everything the worker says on Kafka. A message is said when the broker has acknowledged it, not before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import DeadLetter
from alphaloop.store.outbox import OutboxMessage
from worker.jobs.claiming import ClaimedJob
from worker.jobs.streaming import Sender, TokenStream

FLUSH_S: Final = 30.0


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

    def token_stream(self, batch: Sequence[ClaimedJob]) -> TokenStream:
        """The listener to a batch's steps that streams those of its jobs which asked for it."""
        return TokenStream(self._sender, {c.job_id: c.attempt for c in batch if c.ready.job.body.stream})
