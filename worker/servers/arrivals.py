"""What came from the servers: the event loop's thread puts it here, and the engine's step takes it."""

from __future__ import annotations

import threading
from collections import deque

from worker.servers.request import Event


class Arrivals:
    """Events in the order in which they came. Any thread may put and wake; one takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._is_woken = False

    def put(self, event: Event) -> None:
        """Add one, and end a wait."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def wake(self) -> None:
        """End the wait of `take`, or the next one."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def take(self, wait_s: float) -> list[Event]:
        """All of them; waits that long at most if there is none and nobody wakes."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._is_woken, wait_s)
            self._is_woken = False
            events = list(self._events)
            self._events.clear()
            return events
