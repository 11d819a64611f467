"""The daily partitions of the tables that grow with every job: made ahead, dropped by retention.

There is no default partition, because its rows would block every later partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from datetime import UTC, date, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, text

from alphaloop.store.database import Database

#: Dropped together, so that the ledger has all rows of a day or none.
PARTITIONED: Final = ("decode_runs", "evidence_rows", "switchback_slices", "decision_snapshots")
_MAKE: Final = text("SELECT make_partitions(CAST(:days AS date[]))")
_DROP: Final = text("SELECT drop_partitions(CAST(:before AS date))")
# Read from the catalog, because to_regclass may answer from a cache without the partitions of another process.
_MISSING: Final = text("""
    SELECT day, parent FROM unnest(CAST(:days AS date[])) AS day, unnest(CAST(:tables AS text[])) AS parent
    WHERE NOT EXISTS (
        SELECT FROM pg_class
        WHERE relname = parent || '_' || to_char(day, 'YYYYMMDD') AND pg_table_is_visible(pg_class.oid)
    )
    ORDER BY day, parent
""")
_PARTITIONS: Final = text("""
    SELECT p.relname AS parent, right(c.relname, 8) AS day
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p ON p.oid = i.inhparent
    WHERE p.relname = ANY(:tables) AND p.relkind = 'p' AND pg_table_is_visible(p.oid)
    ORDER BY day, parent
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

        Waits at most `lock_timeout_s` for the users of a table, then raises StoreBusy; the next run tries again.
        """
        with self._database.begin() as connection:
            connection.execute(text("SELECT set_config('lock_timeout', :limit, true)"), {"limit": self._lock_timeout})
            return list(connection.execute(_DROP, {"before": day}).scalar_one())

    def days(self) -> list[date]:
        """The days that have a partition, oldest first."""
        with self._database.begin() as connection:
            return partition_days(connection)


def partition_days(connection: Connection) -> list[date]:
    """The days that have a partition of decode_runs, oldest first."""
    return [day for _, day in _partitions(connection, PARTITIONED[:1])]


def ensure_days(connection: Connection, days: Iterable[date]) -> list[date]:
    """Make the partitions of `days` that are missing, in the caller's transaction; returns the days that were made.

    The database's function does it, so that a worker needs no right to change the schema.
    """
    wanted = {"days": sorted(set(days)), "tables": list(PARTITIONED)}
    if not connection.execute(_MISSING, wanted).first():
        return []
    return list(connection.execute(_MAKE, {"days": wanted["days"]}).scalar_one())


class KnownDays:
    """The days whose partitions one process has seen, so that it need not look for them in every transaction."""

    def __init__(self) -> None:
        self._days: set[date] = set()

    def ensure(self, connection: Connection, days: Set[date]) -> None:
        """As `ensure_days`. What this transaction makes is not known yet, because the transaction may still fail."""
        if (new := days - self._days) and not ensure_days(connection, new):
            self._days |= new

    def forget(self) -> None:
        """Look again: a partition may have been dropped, or the database restored."""
        self._days.clear()


def utc_day(at: datetime) -> date:
    """The day whose partition holds `at` (aware)."""
    return at.astimezone(UTC).date()


def _partitions(connection: Connection, tables: Iterable[str]) -> list[tuple[str, date]]:
    rows = connection.execute(_PARTITIONS, {"tables": list(tables)})
    return [(parent, datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC).date()) for parent, day in rows]
