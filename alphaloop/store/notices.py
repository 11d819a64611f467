"""Notices of changes by other processes: LISTEN on a separate connection.

A notice says only that something changed. Its receiver reads the tables, as it also does at intervals without one,
because a broken connection loses notices. Notices only make changes visible sooner.
"""

from __future__ import annotations

import threading
from typing import Final

import psycopg
from psycopg import sql

from alphaloop.store.database import Database
from alphaloop.store.refusals import store_error

#: Sent by triggers on draft_revisions and drift_events, so that a change in psql sends one too.
DRAFTS_CHANGED: Final = "alphaloop_drafts"
#: Told by whoever writes a cancellation down.
CANCELLATIONS: Final = "alphaloop_cancellations"


class Listener:
    """Waits for notices. One thread owns it; the next wait replaces a lost connection.

    Behind a pooler in transaction mode there are none, and the receiver reads at its intervals.
    """

    def __init__(self, database: Database, *channels: str) -> None:
        """Listens to these channels, or to all that there are."""
        self._database = database
        self._channels = channels or (DRAFTS_CHANGED, CANCELLATIONS)
        self._connection: psycopg.Connection | None = None
        self._ended = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Whether there may be something new: a notice came, or the connection is new and may have missed one.

        Raises StoreUnavailable if the server does not answer or the connection broke.
        """
        if not self._database.keeps_sessions:
            self._ended.wait(timeout_s)
            return False
        if self._connection is None:
            self._connection = self._listen()
            return True
        try:
            return bool(list(self._connection.notifies(timeout=timeout_s, stop_after=1)))
        except psycopg.Error as error:
            self.close()
            raise store_error(error, self._database.redacted_url) from None

    def close(self) -> None:
        """Give the connection back."""
        self._ended.set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _listen(self) -> psycopg.Connection:
        connection = self._database.dedicated()
        try:
            for channel in self._channels:
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        except psycopg.Error as error:
            connection.close()
            raise store_error(error, self._database.redacted_url) from None
        return connection
