"""Writes that may be lost, from a thread of their own: the decoding thread never waits for the database.

Corrected costs, changes of a choice, switchback slices, what decisions were taken from. A write that Postgres refuses
is logged and lost. Outcomes of jobs take another way (worker/recording.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.liveness import beat
from worker.jobs.bounded_queue import BoundedQueue

log = logging.getLogger(__name__)

#: Takes a write and what to call it in the log.
Write: TypeAlias = Callable[[str, Callable[[], object]], object]

_MOST_WAITING: Final = 1000
_IDLE_WAIT_S: Final = 0.2


class BackgroundWrites:
    """Calls that wait for their turn. While the database is away, the oldest wait and new ones are dropped.

    `pause` waits for so many seconds between two tries.
    """

    def __init__(self, pause: Callable[[float], object]) -> None:
        self._pause = pause
        self._queue: BoundedQueue[tuple[str, Callable[[], object]]] = BoundedQueue(
            max_items=_MOST_WAITING, max_bytes=_MOST_WAITING, num_bytes_of=lambda write: 1
        )

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, what: str, write: Callable[[], object]) -> None:
        """Have `write` called soon; `what` names it in the log. Dropped with a warning where too many wait."""
        if not self._queue.num_free:
            log.warning("%s: not written, too many writes wait", what, extra={"action": "background_write_dropped"})
            return
        self._queue.put([(what, write)])

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> None:
        """Do the waiting writes in order. A write that fails because the database is away is repeated next turn."""
        waiting = self._queue.take(_MOST_WAITING, timeout_s)
        for number, (what, write) in enumerate(waiting):
            beat()
            try:
                write()
            except StoreUnavailable as error:
                log.warning("%s: not written yet: %s", what, error.message, extra={"action": "background_write_waits"})
                self._queue.put_back(waiting[number:])
                self._pause(timeout_s)
                return
            except StoreError as error:
                log.warning("%s: not written: %s", what, error.message, extra={"action": "background_write_failed"})
