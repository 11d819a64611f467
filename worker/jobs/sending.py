"""Sends messages and tells of each one what became of it, by its own delivery report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from alphaloop.errors import BrokerError, DeliveryFailed, FatalBrokerError, MessageRefused
from alphaloop.liveness import beat

_SERVE_S: Final = 0.2
#: How long a worker in a hurry waits for reports.
HURRIED_S: Final = 5.0

Report = BrokerError | None  #: None: the broker has acknowledged the message


class Sender(Protocol):
    """What is needed of alphaloop.kafka.producer.Producer."""

    def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivery: Callable[[Report], None] | None = None,
        wait_s: float | None = None,
    ) -> None: ...
    def serve(self, timeout_s: float) -> None: ...
    def poll(self, timeout_s: float) -> None: ...


class Message(NamedTuple):
    """A Kafka message."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


def deliver(
    sender: Sender,
    messages: Sequence[Message],
    *,
    is_hurried: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> list[Report]:
    """Send all of them once and wait until each is acknowledged or has failed; returns a report for each.

    The client reports every message within its delivery.timeout.ms, also while no broker answers. Kafka refuses whole
    batches, so each message of a refused batch is sent once more by itself: a MessageRefused is about that message
    alone. Raises FatalBrokerError when the client is dead.
    """
    reports = _once(sender, messages, is_hurried, clock)
    if len(messages) > 1:
        for number, report in enumerate(reports):
            if isinstance(report, MessageRefused):
                (reports[number],) = _once(sender, [messages[number]], is_hurried, clock)
    return reports


def _once(
    sender: Sender, messages: Sequence[Message], is_hurried: Callable[[], bool], clock: Callable[[], float]
) -> list[Report]:
    told: dict[int, Report] = {}
    for number, message in enumerate(messages):
        try:
            sender.send(
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
    begun = clock()
    while len(told) < len(messages) and not (is_hurried() and clock() - begun >= HURRIED_S):
        beat()  # a broker that is away may be away for long
        sender.serve(_SERVE_S)
    # A message that is still under way may yet be stored; what is sent again is the same, byte for byte.
    reports = [told.get(number, DeliveryFailed("not acknowledged in time")) for number in range(len(messages))]
    for report in reports:
        if isinstance(report, FatalBrokerError):
            raise report
    return reports
