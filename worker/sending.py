"""Sends messages and tells of each one what became of it, by its own delivery report; knows topics that are away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from alphaloop.errors import BrokerError, DeliveryFailed, FatalBrokerError, MessageRefused
from alphaloop.kafka.producer import Producer
from alphaloop.liveness import beat

if TYPE_CHECKING:
    from worker.streams import JobStream

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
    told: dict[int, DeliveryReport] = {}
    for number, message in enumerate(messages):
        try:
            producer.send(
                message.topic,
                key=message.key,
                value=message.value,
                headers=message.headers,
                on_delivery=partial(told.__setitem__, number),
            )
        except FatalBrokerError:
            raise
        except DeliveryFailed as error:
            # The client's buffer is full: what follows would wait as long and find it full, too.
            told.update(dict.fromkeys(range(number, len(messages)), error))
            break
        except BrokerError as error:
            told[number] = error
    begun = time.monotonic()
    while len(told) < len(messages) and not (is_hurried() and time.monotonic() - begun >= HURRIED_S):
        beat()  # a broker that is away may be away for long
        producer.serve(_SERVE_S)
    # A message that is still under way may yet be stored; what is sent again is the same, byte for byte.
    reports = [told.get(number, DeliveryFailed("not acknowledged in time")) for number in range(len(messages))]
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
            told = {"action": "topic_unavailable", "topic": topic, "hint": error.hint or ""}
            log.error("no message reaches the topic %s: %s; trying again", topic, error.message, extra=told)

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
