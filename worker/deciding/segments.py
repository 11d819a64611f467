"""Which segments of a task have evidence of their own. A segment is a free label, so there may be any number.

A decision reads the evidence of all segments of its task: 5,000 of them cost 0.2 s. So a task keeps the `MOST_SEGMENTS`
that were used last apart. Jobs of other segments share the evidence of the task's jobs without a segment. They add to
it and are decided from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final, Protocol, TypeVar

#: Of a task, beside its jobs without a segment.
MOST_SEGMENTS: Final = 64


class Used(Protocol):
    """Evidence of a segment."""

    @property
    def segment(self) -> str: ...
    @property
    def as_of(self) -> datetime: ...


Row = TypeVar("Row", bound=Used)


def last_used(rows: Iterable[Used]) -> dict[str, datetime]:
    """When each segment was used last."""
    found: dict[str, datetime] = {}
    for row in rows:
        found[row.segment] = max(row.as_of, found.get(row.segment, row.as_of))
    return found


def of_segments_used_last(rows: list[Row]) -> list[Row]:
    """The rows of the segments that are kept apart, and those without a segment."""
    used = last_used(rows)
    used.pop("", None)
    if len(used) <= MOST_SEGMENTS:
        return rows
    kept = {"", *nlargest(MOST_SEGMENTS, used, key=lambda segment: (used[segment], segment))}
    return [row for row in rows if row.segment in kept]


class SegmentsApart:
    """Decides for each job whether its segment is kept apart.

    A new segment is, while the task has few. Otherwise the segment used last longest ago makes room, but only after
    `idle`, so that nobody who makes up segments pushes out those in use.
    """

    def __init__(
        self, known: Callable[[str], Mapping[str, datetime]], *, idle: timedelta, now: Callable[[], datetime]
    ) -> None:
        """`known` gives the segments of a task of which there is evidence, and when they were used last."""
        self._known = known
        self._idle = idle
        self._now = now
        self._used: dict[str, dict[str, datetime]] = {}
        self._lock = threading.Lock()

    def keeps(self, task: str, segment: str) -> bool:
        """Whether jobs of this segment have evidence of their own from now on."""
        if not segment:
            return True
        now = self._now()
        with self._lock:
            used = self._used.setdefault(task, {})
            if segment not in used and not self._makes_room(task, used, now):
                return False
            used[segment] = now
            return True

    def _makes_room(self, task: str, used: dict[str, datetime], now: datetime) -> bool:
        if len(used) < MOST_SEGMENTS:
            # Other workers may have seen segments that this one has not.
            others = {name: at for name, at in self._known(task).items() if name and name not in used}
            room = MOST_SEGMENTS - len(used)
            used.update((name, others[name]) for name in nlargest(room, others, key=lambda name: others[name]))
        if len(used) < MOST_SEGMENTS:
            return True
        oldest = min(used, key=lambda name: used[name])
        if now - used[oldest] < self._idle:
            return False
        del used[oldest]
        return True
