"""Leadership: of several processes only the one that holds the lock measures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from alphaloop.errors import StoreError
from alphaloop.store.schedule import AdvisoryLock

log = logging.getLogger(__name__)


class Leadership:
    """Takes the lock when it is free, and detects its loss. One thread uses it.

    `promote` is called after the lock was taken, `demote` after it was found lost or given up.
    """

    def __init__(self, lock: AdvisoryLock, *, promote: Callable[[], None], demote: Callable[[], None]) -> None:
        self._lock, self._promote, self._demote = lock, promote, demote
        self._leads = False
        self._checked_at = time.monotonic()

    @property
    def check_age_s(self) -> float:
        """Seconds since the last check ended; other threads read it."""
        return time.monotonic() - self._checked_at

    @property
    def leads(self) -> bool:
        """Whether this process led at the last check."""
        return self._leads

    def check(self) -> bool:
        """Ask the database once, and act on a change; returns whether this process leads.

        A broken connection is a lost lock.
        """
        held = self._lock.is_held() if self._leads else self._try()
        if held and not self._leads:
            self._leads = True
            log.info("leading", extra={"action": "leader_elected"})
            self._promote()
        elif self._leads and not held:
            self._leads = False
            log.warning("lost the leader's lock", extra={"action": "leader_lost"})
            self._demote()
        self._checked_at = time.monotonic()
        return self._leads

    def resign(self) -> None:
        """Stop leading, then release the lock, so that another process starts only after this one has stopped."""
        if self._leads:
            self._leads = False
            self._demote()
        self._lock.release()

    def _try(self) -> bool:
        try:
            return self._lock.try_acquire()
        except StoreError as error:
            log.warning("%s", error.message, extra={"action": "leader_check_failed", "code": error.code})
            return False
