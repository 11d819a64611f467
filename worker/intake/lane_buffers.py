"""Between the thread that polls and the one that takes: a bounded buffer for each lane, and who waits for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence, Set

from alphaloop.errors import AlphaloopError
from alphaloop.kafka.offsets import TopicPartition
from worker.intake.buffer import NO_ROOM, Buffer, Room
from worker.intake.delivery import Delivery


class LaneBuffers:
    """`put` is called by the thread that polls, `take` by one other thread, and the rest by any."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        """The limits are for each lane."""
        self.high, self.normal = (Buffer(max_items=max_items, max_bytes=max_bytes) for _ in range(2))
        self.failure: AlphaloopError | None = None  #: raised by every `take` from now on
        self.is_open = True  #: whether deliveries are kept
        self._is_woken = False
        self._changed = threading.Condition()

    def of(self, *, is_high: bool) -> Buffer:
        """The buffer of one lane."""
        return self.high if is_high else self.normal

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Let these be taken."""
        if not deliveries:
            return
        with self._changed:
            if self.is_open:
                for delivery in deliveries:
                    self.of(is_high=delivery.is_high).add(delivery)
                self._changed.notify_all()

    def take(
        self, limit: int, timeout_s: float, *, max_bytes: int | None = None, high: Room = NO_ROOM
    ) -> list[Delivery]:
        """Up to `limit` deliveries, until they reach `max_bytes`; those of the high lane first, for which `high` is.

        Waits up to `timeout_s` for the first or for `wake`. Raises `failure`.
        """
        normal = Room(limit, sys.maxsize if max_bytes is None else max_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(normal, high) or self._is_urgent(), timeout_s)
            self._is_woken = False
            if self.failure is not None:
                raise self.failure
            return self.high.take(high) + self.normal.take(normal)

    def wake(self) -> None:
        """Let a waiting `take` return, also without deliveries."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def drop(self, partitions: Set[TopicPartition]) -> None:
        """Forget what came from these."""
        with self._changed:
            self.high.drop(partitions)
            self.normal.drop(partitions)

    def close(self) -> None:
        """Forget everything and keep nothing more; whoever takes goes on waiting for its time."""
        with self._changed:
            self.is_open = False
            self.high.clear()
            self.normal.clear()
            self._changed.notify_all()

    def fail(self, error: AlphaloopError) -> None:
        """Nothing comes any more, because of this."""
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def _has_news(self, normal: Room, high: Room) -> bool:
        return bool((normal and self.normal) or (high and self.high))

    def _is_urgent(self) -> bool:
        return self._is_woken or self.failure is not None
