"""The time of day by the database: deadlines must not depend on the clock of the machine that a worker runs on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.store.database import Database
from alphaloop.store.exchange import driver_of

#: A slower answer says too little about when it was given: the offset measured before stays.
_SLOWEST_ANSWER_S: Final = 1.0


class DatabaseClock:
    """Tells the database's time from one measured offset to this machine's monotonic clock. Threads share it."""

    def __init__(self, database: Database, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._monotonic = monotonic
        self._measured: tuple[datetime, float] | None = None  #: a moment by the database, and the same by this machine

    def now(self) -> datetime:
        """The time, in UTC, right to half a round trip. Asks the database the first time only; then raises nothing.

        Raises StoreError the first time.
        """
        if self._measured is None:
            return self.measure()
        moment, at = self._measured
        return moment + timedelta(seconds=self._monotonic() - at)

    def measure(self) -> datetime:
        """Ask the database, so that a clock that drifts or was set is followed; returns its time. Raises StoreError."""
        with self._database.single() as connection:
            driver = driver_of(connection)
            asked_at = self._monotonic()
            (moment,) = driver.execute("SELECT clock_timestamp()").fetchone() or (None,)
            answered_at = self._monotonic()
        told: datetime = moment.astimezone(UTC)
        if self._measured is None or answered_at - asked_at <= _SLOWEST_ANSWER_S:
            self._measured = told, (asked_at + answered_at) / 2
        return told
