"""The daily partitions of decode_runs: made ahead, dropped by retention.

There is no default partition: its rows would stand in the way of every partition made after them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, text

from alphaloop.store.database import Database

_PREFIX: Final = "decode_runs_"
#: Any fixed number: two processes must not make the same partition at once.
_LOCK: Final = 0x616C7061
_MISSING: Final = text("""
    SELECT day FROM unnest(CAST(:days AS date[])) AS day
    WHERE to_regclass('decode_runs_' || to_char(day, 'YYYYMMDD')) IS NULL
    ORDER BY day
""")
_PARTITIONS: Final = text("""
    SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'decode_runs'::regclass ORDER BY c.relname
""")


class PartitionKeeper:
    """Makes and drops partitions; safe to run from several processes."""

    def __init__(self, database: Database, *, lock_timeout_s: float = 5.0) -> None:
        self._database = database
        self._lock_timeout = f"{lock_timeout_s * 1000:.0f}ms"

    def ensure(self, now: datetime, days_ahead: int) -> list[date]:
        """Make the partitions from the day of `now` to `days_ahead` days later; returns the days that were made."""
        today = utc_day(now)
        with self._database.begin() as connection:
            return ensure_days(connection, [today + timedelta(days=n) for n in range(days_ahead + 1)])

    def drop_before(self, day: date) -> list[date]:
        """Drop the partitions of days before `day`, rows and all; returns those days.

        Waits at most `lock_timeout_s` for those who use the table, then raises StoreError: the next run tries again.
        """
        with self._database.begin() as connection:
            connection.execute(text("SELECT set_config('lock_timeout', :limit, true)"), {"limit": self._lock_timeout})
            old = [found for found in partition_days(connection) if found < day]
            for found in old:
                connection.execute(text(f'DROP TABLE "{_name(found)}"'))
        return old

    def days(self) -> list[date]:
        """The days that have a partition, oldest first."""
        with self._database.begin() as connection:
            return partition_days(connection)


def partition_days(connection: Connection) -> list[date]:
    """The days that have a partition, oldest first."""
    names = connection.execute(_PARTITIONS).scalars()
    return [datetime.strptime(name.removeprefix(_PREFIX), "%Y%m%d").replace(tzinfo=UTC).date() for name in names]


def ensure_days(connection: Connection, days: Iterable[date]) -> list[date]:
    """Make the partitions of `days` that are missing, in the caller's transaction; returns the days that were made.

    A partition is built aside and then attached, which readers and writers of the table do not wait for; CREATE …
    PARTITION OF would lock them all out.
    """
    wanted = {"days": sorted(set(days))}
    if not connection.execute(_MISSING, wanted).first():
        return []
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    missing = list(connection.execute(_MISSING, wanted).scalars())
    for day in missing:
        # Names and bounds come from a date, never from outside; DDL takes no parameters.
        name, start, end = _name(day), f"{day} 00:00+00", f"{day + timedelta(days=1)} 00:00+00"
        connection.execute(text(f'CREATE TABLE "{name}" (LIKE decode_runs INCLUDING ALL EXCLUDING IDENTITY)'))
        connection.execute(
            text(f"ALTER TABLE decode_runs ATTACH PARTITION \"{name}\" FOR VALUES FROM ('{start}') TO ('{end}')")
        )
    return missing


def utc_day(at: datetime) -> date:
    """The day whose partition holds `at` (aware)."""
    return at.astimezone(UTC).date()


def _name(day: date) -> str:
    return f"{_PREFIX}{day:%Y%m%d}"
