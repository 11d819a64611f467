"""How far a partition may be committed when jobs finish out of order. Pure.

The offset that may be committed is that of the oldest unfinished message: everything below it is finished. Offsets
advance by what was delivered, not by counting, since compaction and transaction markers leave holes.
"""

from __future__ import annotations

from collections import deque


class Watermark:
    """One partition during one assignment. Offsets are delivered in ascending order."""

    def __init__(self) -> None:
        self._delivered: deque[int] = deque()
        self._finished: set[int] = set()
        self._next: int | None = None
        self._newest: int | None = None

    def deliver(self, offset: int) -> bool:
        """Note a delivered message; False when this or a later one was delivered before (a repeat)."""
        if self._newest is not None and offset <= self._newest:
            return False
        if not self._delivered:
            self._next = offset
        self._newest = offset
        self._delivered.append(offset)
        return True

    def finish(self, offset: int) -> None:
        """Note a finished message. An offset that is not in flight changes nothing."""
        if self._delivered and self._delivered[0] <= offset and offset not in self._finished:
            self._finished.add(offset)
        while self._delivered and self._delivered[0] in self._finished:
            self._finished.discard(self._delivered.popleft())
        if self._newest is not None:
            self._next = self._delivered[0] if self._delivered else self._newest + 1

    @property
    def committable(self) -> int | None:
        """Next offset to read after a restart; None before the first delivery. Never falls."""
        return self._next

    @property
    def num_in_flight(self) -> int:
        """Delivered and not finished."""
        return len(self._delivered) - len(self._finished)

    @property
    def distance(self) -> int:
        """Offsets from the oldest unfinished message to the newest delivered; what a restart would read again."""
        return 0 if self._next is None or self._newest is None else self._newest + 1 - self._next
