"""Everything the worker publishes on Kafka, from one thread: results, dead letters, streamed tokens.

A message counts as published when the broker has acknowledged it. Only then is it deleted from the outbox, and only
then is its delivery finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from alphaloop.errors import MessageError, StoreValueRefused
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import DeadLetter, result_headers
from alphaloop.messages.headers import encoded
from alphaloop.store.outbox import Outbox, OutboxMessage
from worker.intake.polling import Delivery, Intake
from worker.jobs.bounded_queue import BoundedQueue
from worker.jobs.letters import FailedJob, Letters, failed_job
from worker.jobs.streaming import ChunkMessage, final_message
from worker.metrics import WorkerMetrics
from worker.retry import Retry

log = logging.getLogger(__name__)

FLUSH_S: Final = 30.0
RELAY_LIMIT: Final = 4  #: groups of results recorded earlier that are published in one go
MOST_AT_ONCE: Final = 1024
_IDLE_WAIT_S: Final = 0.2


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """Outcomes of one transaction: the messages to publish, and the deliveries that are finished afterwards."""

    messages: tuple[OutboxMessage, ...]
    deliveries: tuple[Delivery, ...]
    intake: Intake
    failed: tuple[FailedJob, ...] = ()  #: those that become dead letters, too

    @property
    def num_bytes(self) -> int:
        """Size of the results."""
        return sum(len(message.value) for message in self.messages)


@dataclass(frozen=True, slots=True)
class AnswerAgain:
    """A job that was delivered again: its recorded outcome, byte for byte, and the headers handed on to it."""

    delivery: Delivery
    job_id: str
    outcome: bytes
    headers: Mapping[str, str]
    intake: Intake

    @property
    def failed(self) -> tuple[FailedJob, ...]:
        """The job, if its outcome is that it failed."""
        failed = failed_job(self.delivery, self.outcome)
        return (failed,) if failed else ()

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        return len(self.outcome)


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that is no job: it becomes a dead letter."""

    delivery: Delivery
    error: MessageError
    intake: Intake

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return self.delivery.num_bytes


@dataclass(frozen=True, slots=True)
class TryAgain:
    """A job that failed: its message goes to a retry topic."""

    delivery: Delivery
    topic: str
    headers: tuple[tuple[str, bytes], ...]
    code: str  #: of the failure
    intake: Intake

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return self.delivery.num_bytes


#: Chunks with text are not waited for, because the result that follows holds the whole text.
Awaited = Recorded | AnswerAgain | Refused | TryAgain
Publication = Awaited | ChunkMessage


class PublishingQueue:
    """Messages that other threads hand over. A full queue makes these threads wait."""

    def __init__(self, *, max_items: int, max_bytes: int, is_hurried: Callable[[], bool]) -> None:
        self._queue: BoundedQueue[Publication] = BoundedQueue(
            max_items=max_items, max_bytes=max_bytes, num_bytes_of=lambda publication: publication.num_bytes
        )
        self._is_hurried = is_hurried

    def __len__(self) -> int:
        """What is not published yet, what the publisher has in hand among it."""
        return self._queue.num_unsettled

    def put(self, *publications: Publication) -> None:
        """Hand over; waits for room unless the worker is told to hurry."""
        self._queue.put(publications, give_up=self._is_hurried)

    def take(self, timeout_s: float) -> list[Publication]:
        """Take the waiting messages, in their order."""
        return self._queue.take(MOST_AT_ONCE, timeout_s)


class Publisher:
    """The thread that owns the producer. Raises FatalBrokerError when the producer is dead."""

    def __init__(
        self,
        queue: PublishingQueue,
        sender: Sender,
        outbox: Outbox,
        metrics: WorkerMetrics,
        *,
        letters: Letters,
        ensure_dead_letter_topic: Callable[[str], None],
        model: str,
        retry: Retry,
        relay_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._outbox = outbox
        self._metrics = metrics
        self._letters = letters
        self._ensure_dead_letter_topic = ensure_dead_letter_topic
        self._model = model
        self._retry = retry
        self._relay_after_s = relay_after_s
        self._clock = clock
        self._relay_due = clock()
        self._ensured: set[str] = set()

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Publish what waits, then clear the outbox and finish deliveries; returns how many publications."""
        self._relay_overdue()
        publications = self._queue.take(timeout_s)
        awaited = [one for one in publications if not isinstance(one, ChunkMessage)]
        for chunk in publications:
            if isinstance(chunk, ChunkMessage):
                self._retry.until_done("stream", partial(self._send_chunk, chunk))
        if awaited:
            self._retry.until_done("publish", lambda: self._publish(awaited))
            self._settle(awaited)
        return len(publications)

    def _send_chunk(self, chunk: ChunkMessage) -> None:
        self._sender.send(chunk.topic, key=chunk.key, value=chunk.value, headers=chunk.headers)

    def _publish(self, publications: Sequence[Awaited]) -> None:
        """Send everything and wait for the broker's acknowledgement of all of it; done again from the start if not."""
        for one in publications:
            match one:
                case Recorded():
                    self._send_results(one.messages)
                case AnswerAgain():
                    self._send_result(RESULTS, one.job_id, one.outcome, one.headers)
                case Refused():
                    self._send_letter(self._letters.of_message(one.delivery, one.error))
                case TryAgain(delivery, topic, headers):
                    record = delivery.record
                    self._sender.send(topic, key=record.key, value=record.value, headers=headers)
            if isinstance(one, Recorded | AnswerAgain):
                for failed in one.failed:
                    self._send_letter(self._letters.of_job(failed))
        self._sender.flush(FLUSH_S)

    def _send_results(self, messages: Sequence[OutboxMessage]) -> None:
        for message in messages:
            self._send_result(message.topic, (message.key or b"").decode(), message.value, message.headers)

    def _send_result(self, topic: str, job_id: str, result: bytes, carried: Mapping[str, str]) -> None:
        """A recorded result, and before it the chunk that ends the job's stream, if it has one."""
        if final := final_message(result, carried, self._model):
            self._send_chunk(final)
        headers = encoded(result_headers(job_id, carried))
        self._sender.send(topic, key=job_id.encode(), value=result, headers=headers)

    def _send_letter(self, letter: DeadLetter) -> None:
        if letter.topic not in self._ensured:
            self._ensure_dead_letter_topic(letter.topic.removesuffix(".dlq"))
            self._ensured.add(letter.topic)
        self._sender.send(letter.topic, key=letter.key, value=letter.value, headers=tuple(letter.headers))

    def _settle(self, publications: Sequence[Awaited]) -> None:
        """Everything was acknowledged: clear the outbox and finish the deliveries."""
        ids = {message.id for one in publications if isinstance(one, Recorded) for message in one.messages}
        self._retry.until_done("clear outbox", lambda: self._outbox.delete(ids))
        for one in publications:
            match one:
                case Recorded():
                    for failed in one.failed:
                        self._metrics.refused(failed.failure.code)
                    one.intake.finish(one.deliveries)
                case AnswerAgain():
                    for failed in one.failed:
                        self._metrics.refused(failed.failure.code)
                    self._metrics.answered_again(1)
                    one.intake.finish([one.delivery])
                case Refused():
                    self._metrics.refused(one.error.code)
                    _log_refusal(one)
                    one.intake.finish([one.delivery])
                case TryAgain():
                    self._metrics.retried(one.code)
                    one.intake.finish([one.delivery])

    def _relay_overdue(self) -> None:
        """Publish what was recorded and, by a crash or a broken connection during the commit, never published."""
        if self._clock() < self._relay_due:
            return
        self._relay_due = self._clock() + self._relay_after_s

        def emit(messages: Sequence[OutboxMessage]) -> None:
            self._send_results(messages)
            self._sender.flush(FLUSH_S)

        try:
            num_relayed = self._retry.until_done(
                "relay", lambda: self._outbox.relay(emit, older_than_s=self._relay_after_s, limit=RELAY_LIMIT)
            )
        except StoreValueRefused as error:
            log.error("not relayed: %s", error.message, extra={"action": "relay_failed"})
            return
        if num_relayed:
            log.info("published %d results recorded earlier", num_relayed, extra={"action": "outbox_relayed"})


def _log_refusal(refused: Refused) -> None:
    record = refused.delivery.record
    where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    log.warning("refused: %s", refused.error.code, extra={"action": "dead_letter", **where})
