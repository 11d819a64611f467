"""Reads changes of other processes: at once on a notice, and from time to time without one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.liveness import Pulse

log = logging.getLogger(__name__)

#: How soon the thread notices that it has to end, and its pause while the database is away.
_SLICE_S: Final = 0.5


class Notices(Protocol):
    """What is needed of alphaloop.store.database.Listener."""

    def wait(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Watch:
    """Calls `refresh` from a thread of its own: when a notice comes, and every `every_s` at the latest.

    Without notices (the listening connection is lost and cannot be made anew) it continues every `every_s`. A call
    that fails is logged and repeated; the cache keeps its contents meanwhile.
    """

    def __init__(self, notices: Notices, refresh: Callable[[], None], *, every_s: float) -> None:
        self._notices = notices
        self._refresh = refresh
        self._every_s = every_s
        self._is_deaf = False
        self._stop = threading.Event()
        self.pulse = Pulse("the thread watch")
        self._thread = threading.Thread(target=self.pulse.around(self._run), name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def has_died(self) -> bool:
        """Whether the thread ended without being told to."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10 * _SLICE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._await_news()
            if not self._stop.is_set():
                self._refresh_once()
        self._notices.close()

    def _await_news(self) -> None:
        """Return on a notice, after `every_s`, or to end."""
        until = time.monotonic() + self._every_s
        while not self._stop.is_set() and (left_s := until - time.monotonic()) > 0:
            self.pulse.beat()
            try:
                is_told = self._notices.wait(min(left_s, _SLICE_S))
            except StoreUnavailable as error:
                if not self._is_deaf:
                    log.warning("not told of changes: %s", error.message, extra={"action": "notices_lost"})
                self._is_deaf = True
                self._stop.wait(min(left_s, _SLICE_S))
                continue
            if self._is_deaf:
                log.info("told of changes again", extra={"action": "notices_back"})
            self._is_deaf = False
            if is_told:
                return

    def _refresh_once(self) -> None:
        try:
            self._refresh()
        except StoreError as error:
            log.warning("changes not read: %s", error.message, extra={"action": "refresh_failed"})
