"""Reads changes of other processes: at once on a notice, and from time to time without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.store.database import Listener
from worker.background import BackgroundThread

log = logging.getLogger(__name__)

#: How soon the thread notices that it has to end, and its pause while the database is away.
_SLICE_S: Final = 0.5


class Watch:
    """Calls `refresh` from its `thread`: when a notice comes, and every `every_s` at the latest.

    Without notices (the listening connection is lost and cannot be made anew) it continues every `every_s`. A call
    that fails is logged and repeated; the cache keeps its contents meanwhile.
    """

    def __init__(self, notices: Listener, refresh: Callable[[], None], *, every_s: float) -> None:
        self._notices = notices
        self._refresh = refresh
        self._every_s = every_s
        self._is_deaf = False
        self._due = time.monotonic() + every_s
        self.thread = BackgroundThread("watch", self._turn, at_end=notices.close)

    def _turn(self) -> None:
        if not self._is_told(max(0.0, min(self._due - time.monotonic(), _SLICE_S))) and time.monotonic() < self._due:
            return
        try:
            self._refresh()
        except StoreError as error:
            log.warning("changes not read: %s", error.message, extra={"action": "refresh_failed"})
        self._due = time.monotonic() + self._every_s

    def _is_told(self, wait_s: float) -> bool:
        """Whether a notice came within so long."""
        try:
            is_told = self._notices.wait(wait_s)
        except StoreUnavailable as error:
            if not self._is_deaf:
                log.warning("not told of changes: %s", error.message, extra={"action": "notices_lost"})
            self._is_deaf = True
            time.sleep(wait_s)
            return False
        if self._is_deaf:
            log.info("told of changes again", extra={"action": "notices_back"})
        self._is_deaf = False
        return is_told
