"""Sends messages and reports what became of each, by its own delivery report; knows topics that are away.

The messages of a text that is streamed while it is decoded are chunks on the `tokens` topic: what a chunk is,
alphaloop.messages.stream says. The loop makes them (`JobStream.add`), and the thread of the publisher sends them
(`ChunkSender`), so that no result waits for a text that is still growing. A recorded result ends its stream
(`final_message`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeGuard

from alphaloop.engine import TokenDelta
from alphaloop.errors import BrokerError, DeliveryFailed, FatalBrokerError, MessageRefused, TopicUnavailable
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import TOKENS
from alphaloop.liveness import beat
from alphaloop.messages import Chunk, Result, chunk_headers, final_chunk, text_chunk
from alphaloop.messages.headers import encoded
from worker.background import Retry

log = logging.getLogger(__name__)

_SERVE_S: Final = 0.2
#: How long a worker in a hurry waits for reports.
HURRIED_S: Final = 5.0
DeliveryReport = BrokerError | None  #: None: the broker has acknowledged the message


class KafkaMessage(NamedTuple):
    """A Kafka message."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    stream: JobStream | None = None  #: that a chunk with text is part of

    @property
    def num_bytes(self) -> int:
        """Size of its content."""
        return len(self.value or b"")

    def settle(self, *, is_acknowledged: bool) -> None:
        """The broker has acknowledged the message, or it was dropped: nothing more becomes of it. Called once."""
        if self.stream is not None:
            self.stream.num_settled += 1
            self.stream.num_acknowledged += is_acknowledged


def deliver(
    producer: Producer,
    messages: Sequence[KafkaMessage],
    *,
    is_hurried: Callable[[], bool],
) -> list[DeliveryReport]:
    """Send all of them once and wait until each is acknowledged or has failed; returns a report for each.

    The client reports every message within its delivery.timeout.ms, also while no broker answers. Kafka refuses whole
    batches, so each message of a refused batch is sent once more by itself: a MessageRefused is about that message
    alone. Raises FatalBrokerError when the client is dead.
    """
    reports = _once(producer, messages, is_hurried)
    if len(messages) > 1:
        for number, report in enumerate(reports):
            if isinstance(report, MessageRefused):
                (reports[number],) = _once(producer, [messages[number]], is_hurried)
    return reports


def _once(producer: Producer, messages: Sequence[KafkaMessage], is_hurried: Callable[[], bool]) -> list[DeliveryReport]:
    arrived: dict[int, DeliveryReport] = {}
    for number, message in enumerate(messages):
        try:
            producer.send(
                message.topic,
                key=message.key,
                value=message.value,
                headers=message.headers,
                on_delivery=partial(arrived.__setitem__, number),
            )
        except FatalBrokerError:
            raise
        except DeliveryFailed as error:
            # The client's buffer is full: what follows would wait as long and find it full, too.
            arrived.update(dict.fromkeys(range(number, len(messages)), error))
            break
        except BrokerError as error:
            arrived[number] = error
    begun = time.monotonic()
    while len(arrived) < len(messages) and not (is_hurried() and time.monotonic() - begun >= HURRIED_S):
        beat()  # a broker that is away may be away for long
        producer.serve(_SERVE_S)
    # A message that is still under way may yet be stored; what is sent again is the same, byte for byte.
    reports = [arrived.get(number, DeliveryFailed("not acknowledged in time")) for number in range(len(messages))]
    for report in reports:
        if isinstance(report, FatalBrokerError):
            raise report
    return reports


class UnavailableTopics:
    """Called from the threads that send; asked from any."""

    def __init__(self, create: Callable[[str], None], show: Callable[[str, bool], None]) -> None:
        self._create = create
        self._show = show
        self._failed: dict[str, str] = {}
        self._lock = threading.Lock()

    def ensure(self, topic: str) -> BrokerError | None:
        """Create the topic if it is missing; the error if it stays unavailable."""
        try:
            self._create(topic)
        except FatalBrokerError:
            raise
        except BrokerError as error:
            return error
        return None

    def failed(self, topic: str, error: BrokerError) -> None:
        """No message reached the topic. Says so at its first failure in a row."""
        with self._lock:
            is_new = topic not in self._failed
            self._failed[topic] = error.message
        if is_new:
            self._show(topic, True)
            extra = {"action": "topic_unavailable", "topic": topic, "hint": error.hint or ""}
            log.error("no message reaches the topic %s: %s; trying again", topic, error.message, extra=extra)

    def works(self, topic: str) -> None:
        """A message reached the topic."""
        with self._lock:
            was_away = self._failed.pop(topic, None) is not None
        if was_away:
            self._show(topic, False)
            log.warning("the topic %s works again", topic, extra={"action": "topic_available", "topic": topic})

    def reason(self, topic: str) -> str | None:
        """Why no message reaches the topic; None if messages reach it."""
        with self._lock:
            return self._failed.get(topic)


#: Stands in the JSON of every streamed job's result and of no other: inside a string its quotes would be escaped.
_IS_STREAMED = b'"num_chunks":'


class JobStream:
    """The chunks with text of one attempt of one job, numbered from 0. The loop adds them, the publisher settles them.

    The final chunk is made from the recorded result (`final_message`), because only the claim that recorded the outcome
    may end the stream, and because a worker that died may have left that to the relay.
    """

    def __init__(self, job_id: str, attempt: int, carried: Mapping[str, str]) -> None:
        self.num_chunks = 0  #: with text, so far; only the loop changes it
        # Only the publisher's thread changes these two.
        self.num_settled = 0  #: of these, acknowledged or dropped
        self.num_acknowledged = 0  #: of these, acknowledged
        self._begun: set[int] = set()  # texts that have a chunk
        self._job_id = job_id
        self._attempt = attempt
        self._carried = carried

    @property
    def is_settled(self) -> bool:
        """Whether every chunk so far was acknowledged or dropped."""
        return self.num_settled >= self.num_chunks

    @property
    def num_unacknowledged(self) -> int:
        """Chunks so far that the broker has not acknowledged: readers may never see them."""
        return self.num_chunks - self.num_acknowledged

    def add(self, delta: TokenDelta, *, created: int, model: str) -> KafkaMessage:
        """The chunk with the text that one step added; `created` in seconds since 1970."""
        is_first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        piece = delta.text, delta.choice, delta.part, delta.tool_call, delta.logprobs
        chunk = Chunk(self._job_id, self._attempt, self.num_chunks, *piece)
        self.num_chunks += 1
        value = text_chunk(chunk, created=created, model=model, is_first=is_first)
        return _chunk_message(chunk, value, self._carried, self)


def final_message(result: bytes, carried: Mapping[str, str], model: str) -> KafkaMessage | None:
    """The chunk that ends the stream of the job with this recorded result; None for a job that was not streamed."""
    if _IS_STREAMED not in result:
        return None
    final = final_chunk(Result.decode(result), model=model)
    return _chunk_message(*final, carried) if final else None


def _chunk_message(
    chunk: Chunk, value: bytes, carried: Mapping[str, str], stream: JobStream | None = None
) -> KafkaMessage:
    return KafkaMessage(TOKENS, chunk.job_id.encode(), value, encoded(chunk_headers(chunk, carried)), stream)


#: Chunks that an outage kept back. If there are more, the newest are dropped, because results hold the whole text.
MOST_KEPT: Final = 8192


class ChunkSender:
    """Chunks with text are not waited for; the final ones are, together with every chunk that has to be sent again.

    A chunk that was not acknowledged in time is sent again, later than its successors: readers put chunks in order. A
    chunk that Kafka refuses, or whose topic is unavailable, is dropped. Each chunk is settled once.
    """

    def __init__(self, producer: Producer, *, count_dropped: Callable[[str], None], retry: Retry) -> None:
        self._producer = producer
        self._count_dropped = count_dropped
        self._retry = retry
        self._again: deque[KafkaMessage] = deque()
        self._num_under_way = 0

    @property
    def has_under_way(self) -> bool:
        """Whether the client has chunks with text whose delivery reports have not come."""
        return self._num_under_way > 0

    def send(self, chunks: Sequence[KafkaMessage]) -> None:
        """Hand these to the client, after those that have to be sent again. Raises FatalBrokerError."""
        kept = list(self._again)
        self._again.clear()
        for chunk in (*kept, *chunks):
            on_delivery = partial(self._reported, chunk)
            self._num_under_way += 1
            try:
                self._producer.send(
                    chunk.topic,
                    key=chunk.key,
                    value=chunk.value,
                    headers=chunk.headers,
                    on_delivery=on_delivery,
                    wait_s=0.0,
                )
            except FatalBrokerError:
                raise
            except BrokerError as error:
                self._reported(chunk, error)

    def end(self, finals: Sequence[KafkaMessage]) -> None:
        """Publish these final chunks, and wait for them. Raises FatalBrokerError, in a hurry DeliveryFailed."""
        if not finals:
            return
        waiting = [*self._again, *finals]
        self._again.clear()

        def once() -> None:
            reports = deliver(self._producer, waiting, is_hurried=self._retry.hurry.is_set)
            late: list[tuple[KafkaMessage, BrokerError]] = []
            for chunk, report in zip(waiting, reports, strict=True):
                if self._may_arrive(report):
                    late.append((chunk, report))
                else:
                    chunk.settle(is_acknowledged=report is None)
            waiting[:] = [chunk for chunk, _ in late]
            for _, report in late:
                raise report

        self._retry.until_done("end streams", once)

    def _reported(self, chunk: KafkaMessage, report: DeliveryReport) -> None:
        self._num_under_way -= 1
        if isinstance(report, FatalBrokerError):
            return  # the next result meets a dead producer, too
        if report is not None and len(self._again) >= MOST_KEPT:
            self._count_dropped(report.code)
        elif self._may_arrive(report):
            self._again.append(chunk)
            return
        chunk.settle(is_acknowledged=report is None)

    def _may_arrive(self, report: DeliveryReport) -> TypeGuard[BrokerError]:
        """Whether a chunk that was not acknowledged is to be sent again; counts it if not."""
        if isinstance(report, MessageRefused | TopicUnavailable):
            self._count_dropped(report.code)
            return False
        return report is not None
