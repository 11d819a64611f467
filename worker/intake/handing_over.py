"""When partitions go to another worker: what this worker still owes for them, and how long it may take for that.

The rebalance waits meanwhile, so the time is bounded. Whatever is owed afterwards is given back, because its new owner
would otherwise wait for a job that may take long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from alphaloop.kafka.offsets import TopicPartition
from worker.intake.delivery import Delivery, DeliveryKey

#: Of max.poll.interval.ms, after which the broker puts a member out of the group.
SHARE_OF_POLL_INTERVAL: Final = 0.2
_WAIT_S: Final = 0.1


class HandingOver:
    """Claimed deliveries by partition, and the partitions that leave. Any thread may call."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A rebalance waits up to `limit_s`."""
        self._limit_s = limit_s
        self._clock = clock
        self._owed: dict[TopicPartition, set[DeliveryKey]] = {}
        self._leaving: frozenset[TopicPartition] = frozenset()
        self._overdue: frozenset[DeliveryKey] = frozenset()
        self._changed = threading.Condition()

    def owe(self, deliveries: Iterable[Delivery]) -> None:
        """The jobs of these were claimed."""
        with self._changed:
            for delivery in deliveries:
                self._owed.setdefault(delivery.partition, set()).add(delivery.key)

    def settle(self, deliveries: Iterable[Delivery]) -> None:
        """The jobs of these were finished, or given back."""
        with self._changed:
            for delivery in deliveries:
                owed = self._owed.get(delivery.partition, set())
                owed.discard(delivery.key)
                if not owed:
                    self._owed.pop(delivery.partition, None)
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
        until = self._clock() + self._limit_s
        with self._changed:
            while self._owed_now() and self._clock() < until and may_wait():
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
        return frozenset(key for partition in self._leaving for key in self._owed.get(partition, ()))
