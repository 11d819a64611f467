"""The time of day by the database: deadlines must not depend on the clock of the machine that a worker runs on."""

from __future__ import annotations

import math
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
        """Ask the database, so that a clock that drifts or was set is followed; returns its time. Raises StoreError.

        The clock does not go back because one answer took longer than another.
        """
        with self._database.single() as connection:
            driver = driver_of(connection)
            asked_at = self._monotonic()
            (moment,) = driver.execute("SELECT clock_timestamp()").fetchone() or (None,)
            answered_at = self._monotonic()
        told: datetime = moment.astimezone(UTC)
        if self._measured is None:
            self._measured = told, (asked_at + answered_at) / 2
        elif answered_at - asked_at <= _SLOWEST_ANSWER_S:
            self._measured = followed(self._measured, told, asked_at, answered_at)
        return told


def followed(
    known: tuple[datetime, float], told: datetime, asked_at: float, answered_at: float
) -> tuple[datetime, float]:
    """A moment by the database and by this machine: what was `known`, changed as little as an answer asks for.

    `told` was true some time between question and answer (Cristian 1989), so what agrees with that stays. What is
    outside by less than half a round trip has drifted and moves to the nearest end. What is further outside was set:
    half of the round trip is then the best guess.
    """
    half, middle = (answered_at - asked_at) / 2, (asked_at + answered_at) / 2
    ahead = (known[0] - told).total_seconds() + middle - known[1]
    if abs(ahead) <= half:
        return known
    left = math.copysign(half, ahead) if abs(ahead) <= 2 * half else 0.0
    return told + timedelta(seconds=left), middle
