"""Leadership: of several processes only the one that holds the lock measures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from alphaloop.errors import StoreError
from alphaloop.store.terms import Term

log = logging.getLogger(__name__)


class LeaderLock(Protocol):
    """What is needed of alphaloop.store.schedule.AdvisoryLock and alphaloop.store.schedule.LeaderLease."""

    def try_acquire(self) -> bool: ...
    def begin_term(self) -> Term: ...
    def is_held(self) -> bool: ...
    def release(self) -> None: ...


class Leadership:
    """Takes the lock when it is free, and detects its loss. One thread uses it.

    `promote` is called after the lock was taken, with the term in which this process leads; `demote` after the lock was
    found lost or given up.
    """

    def __init__(self, lock: LeaderLock, *, promote: Callable[[Term], None], demote: Callable[[], None]) -> None:
        self._lock, self._promote, self._demote = lock, promote, demote
        self._leads = False

    @property
    def leads(self) -> bool:
        """Whether this process led at the last check."""
        return self._leads

    def check(self) -> bool:
        """Ask the database once, and act on a change; returns whether this process leads.

        A broken connection is a lost lock.
        """
        if not self._leads:
            term = self._try()
            if term is not None:
                self._leads = True
                log.info("leading", extra={"action": "leader_elected", "term": term.number})
                self._promote(term)
        elif not self._lock.is_held():
            self._leads = False
            log.warning("lost the leader's lock", extra={"action": "leader_lost"})
            self._demote()
        return self._leads

    def resign(self) -> None:
        """Stop leading, then release the lock, so that another process starts only after this one has stopped."""
        if self._leads:
            self._leads = False
            self._demote()
        self._lock.release()

    def _try(self) -> Term | None:
        try:
            return self._lock.begin_term() if self._lock.try_acquire() else None
        except StoreError as error:
            log.warning("%s", error.message, extra={"action": "leader_check_failed", "code": error.code})
            return None
