"""A queue between two threads, bounded in count and in bytes: a full queue makes its producer wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from alphaloop.liveness import beat

Item = TypeVar("Item")


class BoundedQueue(Generic[Item]):
    """First in, first out. An item larger than `max_bytes` is added only while the queue is empty."""

    def __init__(self, *, max_items: int, max_bytes: int, num_bytes_of: Callable[[Item], int]) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._num_bytes_of = num_bytes_of
        self._items: deque[Item] = deque()
        self._num_bytes = 0
        self._num_in_hand = 0
        self._changed = threading.Condition()
        self._is_woken = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes of the items that wait."""
        return self._num_bytes

    @property
    def num_unsettled(self) -> int:
        """Items that wait, and those of the last `take`, which count as settled at the next `take`."""
        with self._changed:
            return len(self._items) + self._num_in_hand

    @property
    def num_free(self) -> int:
        """Items for which there is room; 0 where the bytes are used up."""
        with self._changed:
            is_full = bool(self._items) and self._num_bytes >= self._max_bytes
            return 0 if is_full else max(0, self._max_items - len(self._items))

    def put(self, items: Iterable[Item], *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Add items in their order, waiting for room; the rest is added at once when `give_up` says so.

        Whoever takes is woken when no more fit or all are added, so that items put together can be taken together.
        """
        with self._changed:
            num_added = 0
            for item in items:
                num_bytes = self._num_bytes_of(item)
                while not self._fits(num_bytes) and not give_up():
                    if num_added:
                        self._changed.notify_all()
                    beat()
                    self._changed.wait(0.1)
                self._items.append(item)
                self._num_bytes += num_bytes
                num_added += 1
            if num_added:
                self._changed.notify_all()

    def take(self, limit: int, timeout_s: float, *, max_bytes: int | None = None) -> list[Item]:
        """Up to `limit` items, as far as `max_bytes` allow, one at least; waits up to `timeout_s` for the first."""
        with self._changed:
            self._num_in_hand = 0
            self._changed.wait_for(lambda: self._items or self._is_woken, timeout_s)
            self._is_woken = False
            taken: list[Item] = []
            num_bytes = 0
            while self._items and len(taken) < limit:
                size = self._num_bytes_of(self._items[0])
                if taken and max_bytes is not None and num_bytes + size > max_bytes:
                    break
                num_bytes += size
                taken.append(self._items.popleft())
            self._num_bytes -= num_bytes
            self._num_in_hand = len(taken)
            if taken:
                self._changed.notify_all()
            return taken

    def take_all(self) -> list[Item]:
        """Everything that waits."""
        with self._changed:
            return self.take(len(self._items), 0.0)

    def put_back(self, items: Iterable[Item]) -> None:
        """Return items that were just taken to the front, in their order, whatever room there is."""
        returned = list(items)
        with self._changed:
            self._items.extendleft(reversed(returned))
            self._num_bytes += sum(map(self._num_bytes_of, returned))

    def wake(self) -> None:
        """Let the next or waiting `take` return although nothing may have come."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        if not self._items:
            return True
        return len(self._items) < self._max_items and self._num_bytes + num_bytes <= self._max_bytes
