"""Publishes messages of jobs on other topics: dead letters, and jobs to be tried again.

It has a thread and a producer of its own, so neither a slow message nor a missing topic holds up a result. A delivery
is finished only when its message on the other topic is acknowledged. Messages whose topic is unavailable wait in
memory. When many wait, the intake reads no more of the topic that they came from, and every other topic goes on.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from alphaloop.errors import BrokerError, FatalBrokerError, MessageRefused
from alphaloop.messages import DeadLetter
from alphaloop.messages.dead_letter import shortened
from worker.background import BoundedQueue
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake
from worker.jobs.letters import DeadMessage, Letters
from worker.jobs.sending import Message, Sender, deliver
from worker.jobs.unavailable_topics import UnavailableTopics
from worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0  #: between two tries to publish on an unavailable topic
#: Waiting messages for one topic from which on no more is read of the topics that they came from.
MOST_WAITING: Final = 256
MOST_WAITING_BYTES: Final = 8 << 20
MOST_AT_ONCE: Final = 256
_IDLE_WAIT_S: Final = 0.2


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


Forwarded = DeadMessage | TryAgain


@dataclass(frozen=True, slots=True)
class _Going:
    """A message on its way, and the letter as it is to be sent."""

    origin: Forwarded
    letter: DeadLetter | Message


class OwnSender(Sender, Protocol):
    """A producer that nobody else uses."""

    def close(self) -> None: ...


class Forwarder:
    """`put` never waits, so a message that goes on to another topic holds up no job."""

    def __init__(
        self,
        open_sender: Callable[[], OwnSender],
        topics: UnavailableTopics,
        metrics: WorkerMetrics,
        *,
        letters: Letters,
        is_hurried: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_sender` is called for the first message, and again after a fatal error of the producer."""
        self._open_sender = open_sender
        self._topics = topics
        self._metrics = metrics
        self._letters = letters
        self._is_hurried = is_hurried
        self._clock = clock
        self._sender: OwnSender | None = None
        self._queue: BoundedQueue[Forwarded] = BoundedQueue(
            max_items=1, max_bytes=1, num_bytes_of=lambda one: one.num_bytes
        )
        self._ensured: set[str] = set()
        self._retry_due: dict[str, float] = {}  #: topics that are unavailable
        self._waiting: dict[str, list[_Going]] = {}  #: by the topic that they go to

    def __len__(self) -> int:
        """Messages that are not published yet, without those whose topic is unavailable."""
        return self._queue.num_unsettled

    def put(self, *messages: Forwarded) -> None:
        """Hand over; never waits."""
        self._queue.put(messages, give_up=lambda: True)

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> None:
        """Publish what came, and what waits for a topic that is due to be tried again."""
        new: dict[str, list[_Going]] = defaultdict(list)
        for one in self._queue.take(MOST_AT_ONCE, timeout_s):
            going = self._going(one)
            new[going.letter.topic].append(going)
        due = {topic for topic, at in self._retry_due.items() if at <= self._clock()}
        for topic in new.keys() | due:
            its = [*self._waiting.pop(topic, []), *new[topic]]
            if topic in self._retry_due and topic not in due:
                self._waiting[topic] = its
            else:
                self._publish(topic, its)
            self._balance(its, self._waiting.get(topic, []))

    def close(self) -> None:
        """Close the producer. Messages that wait are dropped here, and are delivered again."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _going(self, one: Forwarded) -> _Going:
        match one:
            case DeadMessage():
                return _Going(one, self._letters.of(one))
            case TryAgain(delivery, topic, headers):
                return _Going(one, Message(topic, delivery.record.key, delivery.record.value, headers))

    def _publish(self, topic: str, messages: list[_Going]) -> None:
        # A message of a partition that went to another worker is that worker's.
        messages = [one for one in messages if one.origin.intake.is_current(one.origin.delivery)]
        failure = self._ensure(topic)
        while messages and failure is None:
            messages, failure = self._send(messages)
        if failure is None:
            self._retry_due.pop(topic, None)
            self._topics.works(topic)
            return
        self._topics.failed(topic, failure)
        self._ensured.discard(topic)
        self._retry_due[topic] = self._clock() + RETRY_S
        self._waiting[topic] = messages

    def _ensure(self, topic: str) -> BrokerError | None:
        if topic in self._ensured:
            return None
        failure = self._topics.ensure(topic)
        if failure is None:
            self._ensured.add(topic)
        return failure

    def _send(self, messages: Sequence[_Going]) -> tuple[list[_Going], BrokerError | None]:
        """Send each once. Returns what is not published, shortened where that may help, and why it cannot be now."""
        if self._sender is None:
            self._sender = self._open_sender()
        letters = [one.letter for one in messages]
        sent = [Message(letter.topic, letter.key, letter.value, tuple(letter.headers)) for letter in letters]
        try:
            reports = deliver(self._sender, sent, is_hurried=self._is_hurried)
        except FatalBrokerError as error:
            self.close()  # the next try has a new producer
            return list(messages), error
        left: list[_Going] = []
        failure: BrokerError | None = None
        for one, report in zip(messages, reports, strict=True):
            if report is None:
                self._published(one.origin)
            elif isinstance(report, MessageRefused) and (less := _shortened(one)) is not None:
                self._metrics.letter_shortened()
                left.append(less)
            else:
                left.append(one)
                failure = report
        return left, failure

    def _published(self, origin: Forwarded) -> None:
        match origin:
            case DeadMessage():
                self._metrics.refused(origin.reason.code)
                record = origin.delivery.record
                where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
                log.warning("dead letter: %s", origin.reason.code, extra={"action": "dead_letter", **where})
            case TryAgain():
                self._metrics.retried(origin.code)
        origin.intake.finish([origin.delivery])

    def _balance(self, before: Sequence[_Going], waiting: Sequence[_Going]) -> None:
        """Have the intake read no more of the topics that many waiting messages came from, or go on with them."""
        is_full = len(waiting) >= MOST_WAITING or sum(one.origin.num_bytes for one in waiting) >= MOST_WAITING_BYTES
        for intake, topic in {(one.origin.intake, one.origin.delivery.record.topic) for one in (*before, *waiting)}:
            if is_full:
                intake.hold(topic)
            else:
                intake.release(topic)


def _shortened(one: _Going) -> _Going | None:
    """A dead letter with less of its message. A job that is tried again needs its whole message."""
    less = shortened(one.letter) if isinstance(one.letter, DeadLetter) else None
    return None if less is None else _Going(one.origin, less)
