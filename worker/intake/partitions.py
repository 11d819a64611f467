"""The partitions that are ours: what their messages are delivered as, how far each may be committed, how one leaves.

A partition during one assignment is an `AssignedPartition`. Its messages come out as `Delivery`s, and its `Watermark`
says which offset may be committed when jobs finish out of order. When it goes to another worker, `HandingOver` knows
which claimed jobs of it have still to end.

A retry topic is first in, first out, and all its messages wait equally long, but for a little jitter. So the head of a
partition is due first: the partition is paused until then, and no other waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, TypeAlias

from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.messages.headers import RetryHeaders, sent_headers
from alphaloop.messages.topics import is_high, retry_delay_s

log = logging.getLogger(__name__)

#: Partition, epoch and number.
DeliveryKey: TypeAlias = tuple[TopicPartition, int, int]

#: Between two questions whether a rebalance may still wait.
_WAIT_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message, and the assignment under which it came: completions of an earlier assignment are void."""

    record: Record  #: the message as it was sent, also of a job that is tried again
    epoch: int
    number: int = 0  #: of the deliveries of its partition in this assignment
    retried_from: TopicPartition | None = None  #: the partition of the retry topic, if it comes from there
    partition: TopicPartition = field(init=False, compare=False)  #: where it lies

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition", self.retried_from or self.record.topic_partition)

    @property
    def key(self) -> DeliveryKey:
        """Names the delivery in this process."""
        return self.partition, self.epoch, self.number

    @property
    def is_high(self) -> bool:
        """Whether it goes before others of its task."""
        return is_high(self.record.topic)

    @property
    def num_bytes(self) -> int:
        """What it takes in a buffer."""
        return self.record.num_bytes


class Watermark:
    """How far a partition may be committed when jobs finish out of order. Pure.

    The offset that may be committed is that of the oldest unfinished message: everything below it is finished. Offsets
    advance by what was delivered, not by counting, since compaction and transactions leave offsets without a message.
    Those after the newest message are passed over, or the group would never reach the end of a partition that ends so.

    An offset that is not above the one before means that the log went back: the topic was made anew, or a leader that
    lacked the last records was elected. What was delivered at that offset and above is then no longer in the log, and
    other messages stand there. So they are delivered, and the watermark goes back with the log. Messages below that
    offset are still in the log and still hold the watermark. Should the same messages come again instead, they are
    handled twice: their jobs are known by their ids and answered from the record.
    """

    def __init__(self) -> None:
        self._unfinished: OrderedDict[int, int] = OrderedDict()  # offsets by number; both rise
        self._num_delivered = 0
        self._next: int | None = None  # the offset after what was delivered or passed over
        #: Next offset to read after a restart; None before anything was read. It falls only when the log goes back.
        self.committable: int | None = None

    @property
    def num_in_flight(self) -> int:
        """Messages delivered, not finished, and still in the log."""
        return len(self._unfinished)

    @property
    def distance(self) -> int:
        """Offsets from the oldest unfinished message to the newest read; what a restart would read again."""
        return 0 if self._next is None or self.committable is None else self._next - self.committable

    def deliver(self, offset: int) -> tuple[int, bool]:
        """Note a delivered message; returns its number, for `finish`, and whether the log went back to this offset."""
        went_back = self._next is not None and offset < self._next
        while went_back and self._unfinished and next(reversed(self._unfinished.values())) >= offset:
            self._unfinished.popitem()
        number, self._num_delivered = self._num_delivered, self._num_delivered + 1
        self._unfinished[number], self._next = offset, offset + 1
        self._move()
        return number, went_back

    def pass_over(self, offset: int) -> None:
        """Note that no message lies between the newest delivered one and this offset."""
        self._next = max(offset, self._next or 0)
        self._move()

    def finish(self, number: int) -> None:
        """Note a finished message. A delivery that the watermark does not wait for changes nothing."""
        self._unfinished.pop(number, None)
        self._move()

    def _move(self) -> None:
        self.committable = next(iter(self._unfinished.values()), self._next)


#: A retry waits longer than its topic's delay by up to this share, drawn at random, so that jobs that failed together
#: do not come back together. Within a partition a message waits at most this share for the one before.
JITTER: Final = 0.2


def as_sent(record: Record, now: datetime) -> tuple[Record, float]:
    """The message that failed, at its origin, and the seconds until it is due; a record that is no retry as it is.

    It waits no longer than the topic's delay and its jitter, whatever the clock of the worker was that sent it.
    """
    delay_s = retry_delay_s(record.topic)
    said = RetryHeaders.read(record.headers) if delay_s is not None else None
    if delay_s is None or said is None:
        return record, 0.0
    sent = replace(
        record,
        topic=said.topic,
        partition=said.partition,
        offset=said.offset,
        timestamp_ms=said.timestamp_ms,
        headers=tuple(sent_headers(record.headers)),
    )
    return sent, min(max(0.0, said.not_before_ms / 1000 - now.timestamp()), delay_s * (1 + JITTER))


@dataclass(slots=True)
class AssignedPartition:
    """A partition during one assignment, whose number is `epoch`.

    The messages of a retry topic become due in their order. The first that is not due and all after it wait in
    `not_due`, each with its time by the intake's clock.
    """

    partition: TopicPartition
    epoch: int
    watermark: Watermark = field(default_factory=Watermark)
    committed: int | None = None
    is_paused: bool = False
    not_due: deque[tuple[float, Delivery]] = field(default_factory=deque)
    is_high: bool = field(init=False)
    is_retry: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_high = is_high(self.partition.topic)
        self.is_retry = retry_delay_s(self.partition.topic) is not None

    def deliver(self, record: Record, now: Callable[[], datetime], at_s: float) -> Delivery | None:
        """The delivery of a message, unless it has to wait; `at_s` is the intake's clock."""
        number, went_back = self.watermark.deliver(record.offset)
        if went_back:
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning("offsets went back: the topic was made anew or cut", extra={"action": "log_went_back", **where})
        if not self.is_retry:
            return Delivery(record, self.epoch, number)
        sent, wait_s = as_sent(record, now())
        delivery = Delivery(sent, self.epoch, number, None if sent is record else self.partition)
        if wait_s > 0 or self.not_due:
            self.not_due.append((at_s + wait_s, delivery))
            return None
        return delivery

    def take_due(self, at_s: float) -> list[Delivery]:
        """Take out the deliveries that are due now."""
        due = []
        while self.not_due and self.not_due[0][0] <= at_s:
            due.append(self.not_due.popleft()[1])
        return due

    @property
    def to_commit(self) -> int | None:
        """The next offset to read after a restart, unless that is committed."""
        offset = self.watermark.committable
        return None if offset == self.committed else offset


class HandingOver:
    """What this worker still owes for partitions that go to another worker. Any thread may call.

    The rebalance waits for claimed jobs of these partitions, so that their new owner need not decode them again, but
    only for a bounded time. Jobs that are still owed afterwards are overdue: they are given back, because their new
    owner would otherwise wait for a job that may take long.
    """

    def __init__(self, limit_s: float) -> None:
        """A rebalance waits up to `limit_s`."""
        self._limit_s = limit_s
        self._owed: set[DeliveryKey] = set()
        self._leaving: frozenset[TopicPartition] = frozenset()
        self._overdue: frozenset[DeliveryKey] = frozenset()
        self._changed = threading.Condition()

    def owe(self, deliveries: Iterable[Delivery]) -> None:
        """The jobs of these were claimed."""
        with self._changed:
            self._owed.update(delivery.key for delivery in deliveries)

    def settle(self, deliveries: Iterable[Delivery]) -> None:
        """The jobs of these were finished, or given back."""
        with self._changed:
            self._owed.difference_update(delivery.key for delivery in deliveries)
            self._changed.notify_all()

    def is_leaving(self, partition: TopicPartition) -> bool:
        """Whether the partition is on its way to another worker."""
        return partition in self._leaving

    def begin(self, partitions: Sequence[TopicPartition]) -> None:
        """These partitions leave: nothing of them may be started any more."""
        self._leaving = frozenset(partitions)

    def wait(self, may_wait: Callable[[], bool]) -> int:
        """Wait until nothing is owed for the leaving partitions; returns how many jobs are overdue after the limit.

        `may_wait` is asked ten times a second.
        """
        until = time.monotonic() + self._limit_s
        with self._changed:
            while self._owed_now() and time.monotonic() < until and may_wait():
                self._changed.wait(_WAIT_S)
            overdue = self._owed_now()
            self._overdue |= overdue
            self._leaving = frozenset()
            return len(overdue)

    def take_overdue(self) -> frozenset[DeliveryKey]:
        """Deliveries of partitions that have left, whose jobs are to be given back now."""
        with self._changed:
            overdue, self._overdue = self._overdue, frozenset()
            return overdue

    def _owed_now(self) -> frozenset[DeliveryKey]:
        return frozenset(key for key in self._owed if key[0] in self._leaving)
