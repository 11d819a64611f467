"""Messages that wait to be read, each segment's behind its own.

A worker reads few of the messages that it has, because a read job takes several times a message's memory. Those that
were read fill the queue; the others wait here as they came, by task and segment. Where there is room for
one more, it is read of whoever has the fewest read ones waiting. So a segment that sent many jobs keeps no other out,
as far as the worker has the messages: up to `worker.max_buffered_bytes`, and up to
`worker.intake.polling.MAX_WATERMARK_DISTANCE` offsets of a partition behind its oldest unfinished job.

Nothing is dropped to be fetched again: a message stays here until it is read or its partition leaves, and holds its
partition's watermark like any other.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Final

from alphaloop.messages.topics import task_of
from worker.intake.partitions import Delivery

#: Inside a text a quotation mark is escaped, so this finds the name of a field.
_SEGMENT: Final = re.compile(rb'"segment"\s*:\s*("(?:[^"\\]|\\.){1,1000}")')


class Unread:
    """The unread messages of the high lanes, or of the others. One thread owns it, the feed's."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lines: dict[tuple[str, str], deque[Delivery]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def room_bytes(self) -> int:
        """Bytes that may be put; 0 or less for none."""
        return self._max_bytes - self._num_bytes

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Let these wait behind those of their tasks and segments."""
        for delivery in deliveries:
            line = task_of(delivery.record.topic) or "", segment_in(delivery.record.value)
            self._lines.setdefault(line, deque()).append(delivery)
            self._num_bytes += delivery.num_bytes

    def take(self, num_read: Callable[[str, str], int]) -> Iterator[Delivery]:
        """Take out one after the other, as long as the caller asks, of whoever has the fewest read ones waiting.

        `num_read`: how many read jobs of a task and segment wait. What was taken here counts as read.
        """
        turns = [(num_read(*line), number, line) for number, line in enumerate(self._lines)]
        heapify(turns)
        while turns:
            num, number, line = turns[0]
            waiting = self._lines[line]
            delivery = waiting.popleft()
            self._num_bytes -= delivery.num_bytes
            if waiting:
                heapreplace(turns, (num + 1, number, line))
            else:
                heappop(turns)
                del self._lines[line]
            yield delivery

    def discard(self, unwanted: Callable[[Delivery], bool]) -> None:
        """Drop those for which `unwanted` holds (their partition went to another worker)."""
        left = [one for waiting in self._lines.values() for one in waiting if not unwanted(one)]
        self._lines, self._num_bytes = {}, 0
        self.put(left)


def segment_in(value: bytes | None) -> str:
    """The segment that a message seems to name; empty for none. Only its place in line depends on it.

    Reading the whole message for it would take a hundred times as long. A field of that name deeper in the message may
    be taken for it: the job still runs as its own segment's.
    """
    found = _SEGMENT.search(value or b"")
    if found is None:
        return ""
    try:
        return str(json.loads(found[1].decode()))
    except ValueError:
        return ""
