"""How far a partition may be committed when jobs finish out of order. Pure.

The offset that may be committed is that of the oldest unfinished message: everything below it is finished. Offsets
advance by what was delivered, not by counting, since compaction and transactions leave offsets without a message. Those
after the newest message are passed over, or the group would never reach the end of a partition that ends so.

An offset that is not above the one before means that the log went back: the topic was made anew, or a leader that
lacked the last records was elected. What was delivered at that offset and above is then no longer in the log, and other
messages stand there. So they are delivered, and the watermark goes back with the log. Messages below that offset are
still in the log and still hold the watermark. Should the same messages come again instead, they are handled twice:
their jobs are known by their ids and answered from the record.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


class Delivered(NamedTuple):
    """The answer to a delivery."""

    number: int  #: names the delivery in `finish`, because an offset may be delivered again
    went_back: bool  #: whether the log went back to this offset


@dataclass(slots=True)
class _InFlight:
    number: int
    offset: int
    is_finished: bool = False


class Watermark:
    """One partition during one assignment."""

    def __init__(self) -> None:
        self._in_order: deque[_InFlight] = deque()  # by offset and by number, from the oldest unfinished on
        self._by_number: dict[int, _InFlight] = {}
        self._num_unfinished = 0
        self._num_delivered = 0
        self._next: int | None = None
        self._newest: int | None = None

    def deliver(self, offset: int) -> Delivered:
        """Note a delivered message."""
        went_back = self._newest is not None and offset <= self._newest
        if went_back:
            self._forget_from(offset)
        one = _InFlight(self._num_delivered, offset)
        self._num_delivered += 1
        self._num_unfinished += 1
        self._newest = offset
        self._in_order.append(one)
        self._by_number[one.number] = one
        self._next = self._in_order[0].offset
        return Delivered(one.number, went_back)

    def pass_over(self, offset: int) -> None:
        """Note that no message lies between the newest delivered one and this offset."""
        if self._newest is None or offset > self._newest + 1:
            self._newest = offset - 1
            if not self._in_order:
                self._next = offset

    def finish(self, number: int) -> None:
        """Note a finished message. A delivery that the watermark does not wait for changes nothing."""
        one = self._by_number.pop(number, None)
        if one is None:
            return
        one.is_finished = True
        self._num_unfinished -= 1
        while self._in_order and self._in_order[0].is_finished:
            self._in_order.popleft()
        if self._newest is not None:
            self._next = self._in_order[0].offset if self._in_order else self._newest + 1

    @property
    def committable(self) -> int | None:
        """Next offset to read after a restart; None before anything was read. It falls only when the log goes back."""
        return self._next

    @property
    def num_in_flight(self) -> int:
        """Delivered, not finished, and still in the log."""
        return self._num_unfinished

    @property
    def distance(self) -> int:
        """Offsets from the oldest unfinished message to the newest read; what a restart would read again."""
        return 0 if self._next is None or self._newest is None else self._newest + 1 - self._next

    def _forget_from(self, offset: int) -> None:
        while self._in_order and self._in_order[-1].offset >= offset:
            gone = self._in_order.pop()
            if self._by_number.pop(gone.number, None) is not None:
                self._num_unfinished -= 1
