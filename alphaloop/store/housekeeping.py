"""Housekeeping: the daily partitions of tables that grow with every job, and the deletion of old rows.

Partitions are made ahead and dropped whole. There is no default partition, because its rows would block every later
partition. Rows of other tables are deleted in portions of one short transaction each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, text

from alphaloop.store.database import Database

#: Dropped together, so that the ledger has all rows of a day or none.
_PARTITIONED: Final = ("decode_runs", "evidence_rows", "switchback_slices", "decision_snapshots")


def ensure_ahead(database: Database, now: datetime, days_ahead: int) -> list[date]:
    """Make the partitions from the day of `now` to `days_ahead` days later; returns the days that were made."""
    today = utc_day(now)
    with database.begin() as connection:
        return ensure_days(connection, [today + timedelta(days=n) for n in range(days_ahead + 1)])


def drop_days_before(database: Database, day: date) -> list[date]:
    """Drop the partitions of days before `day`, rows and all; returns those days.

    Waits for the users of a table as long as the session may wait for a lock, then raises StoreBusy; the next run tries
    again.
    """
    return list(database.scalar(_DROP, {"before": day}))


def ensure_days(connection: Connection, days: Iterable[date]) -> list[date]:
    """Make the partitions of `days` that are missing, in the caller's transaction; returns the days that were made.

    The database's function does it, so that a worker needs no right to change the schema.
    """
    wanted = {"days": sorted(set(days)), "tables": list(_PARTITIONED)}
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


#: Rows of one transaction: some ten milliseconds.
CHUNK_ROWS: Final = 1000
#: Texts in a folder or an object store that are deleted between two looks at the time.
_CHUNK_TEXTS: Final = 50


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one call deleted; `is_all` is False where the time was up first."""

    num_rows: int
    is_all: bool


class RetentionStore:
    """Deletes old rows until none is left or the time is up."""

    def __init__(self, database: Database, *, chunk_rows: int = CHUNK_ROWS) -> None:
        self._database = database
        self._chunk_rows = chunk_rows

    def drop_jobs(self, before: datetime, time_is_up: Callable[[], bool]) -> Dropped:
        """Delete jobs that ended before `before`, with their texts, and claims that nobody renewed since then.

        A job whose result Kafka has not acknowledged is kept. `time_is_up` is asked between two transactions.
        """
        given = {"since": datetime.min.replace(tzinfo=UTC), "before": before, "chunk": self._chunk_rows}

        def chunk() -> int:
            num_rows, last = self._database.one(_JOBS, given)
            # The next chunk does not pass over the remains of those before it.
            given["since"] = last
            return int(num_rows)

        return _dropped(chunk, self._chunk_rows, time_is_up)

    def drop_texts(self, before: datetime, time_is_up: Callable[[], bool], delete: Callable[[str], None]) -> Dropped:
        """Delete texts outside Postgres whose jobs are gone, each with `delete`, and then their rows.

        A text whose deletion was interrupted is deleted again. Raises whatever `delete` raises.
        """

        def chunk() -> int:
            urls = self._database.scalars(_TEXTS, {"before": before, "chunk": _CHUNK_TEXTS})
            for url in urls:
                delete(url)
            self._database.change(_FORGET_TEXTS, {"urls": urls})
            return len(urls)

        return _dropped(chunk, _CHUNK_TEXTS, time_is_up)

    def drop(self, table: str, before: datetime, time_is_up: Callable[[], bool]) -> Dropped:
        """Delete the rows of one of `TABLES` that belong to the time before `before`."""
        statement = text(
            f"DELETE FROM {table} WHERE ctid = ANY(ARRAY("  # noqa: S608 - a name of this module, no values
            f"SELECT ctid FROM {table} WHERE {_TOO_OLD[table]} LIMIT :chunk FOR UPDATE SKIP LOCKED))"
        )
        given = {"before": before, "chunk": self._chunk_rows}
        return _dropped(lambda: self._database.change(statement, given), self._chunk_rows, time_is_up)


def _dropped(chunk: Callable[[], int], full: int, time_is_up: Callable[[], bool]) -> Dropped:
    """Delete chunks until one is not `full`; `chunk` returns how many rows it deleted."""
    num_rows = 0
    while not time_is_up():
        found = chunk()
        num_rows += found
        if found < full:
            return Dropped(num_rows, is_all=True)
    return Dropped(num_rows, is_all=False)


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
# By the time of creation, because an index on the time of the end would make every outcome write to all indexes. What
# ended before a moment was created before it. A claim whose lease ended so long ago is of a job whose message is gone.
# A job whose result was never acknowledged stays. An array, because a join would read and sort all that is too old.
_JOBS: Final = text("""
    WITH old AS MATERIALIZED (
        SELECT job_id, created_at FROM jobs
        WHERE created_at >= :since AND created_at < :before
            AND (finished_at < :before OR (finished_at IS NULL AND lease_expires_at < :before))
            AND job_id <> ALL(ARRAY(SELECT unnest(job_ids) FROM outbox WHERE outbox.created_at < :before))
        ORDER BY created_at LIMIT :chunk FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM jobs WHERE job_id = ANY(ARRAY(SELECT job_id FROM old))
    )
    SELECT count(*), max(created_at) FROM old
""")
# A text may not go before its job, because a job that is delivered again is answered with the reference to it.
_TEXTS: Final = text("""
    SELECT url FROM stored_texts
    WHERE stored_at < :before AND NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = stored_texts.job_id)
    ORDER BY stored_at LIMIT :chunk
""")
_FORGET_TEXTS: Final = text("DELETE FROM stored_texts WHERE url = ANY(:urls)")
#: By table, which rows are too old. Every name is a table that grows with time and is not partitioned.
_TOO_OLD: Final = {
    # One of a job that still runs is still to be carried out.
    "cancellations": """
        requested_at < :before AND NOT EXISTS (
            SELECT FROM jobs WHERE jobs.job_id = cancellations.job_id AND jobs.status = 'running'
        )""",
    # The last choice of a subject before `before` is what was in force then, unless nothing of its target is left.
    "decisions": """
        decided_at < :before AND (
            EXISTS (
                SELECT FROM decisions AS newer
                WHERE newer.task = decisions.task AND newer.target_revision = decisions.target_revision
                    AND newer.device = decisions.device AND newer.sampling_bucket = decisions.sampling_bucket
                    AND newer.id > decisions.id AND newer.decided_at < :before
            ) OR NOT EXISTS (
                SELECT FROM acceptance_state AS known
                WHERE known.task = decisions.task AND known.target_revision = decisions.target_revision
            )
        )""",
    "audit": "at < :before",
    # One that nobody could go on with is not kept for ever either.
    "api_batches": "expires_at < :before",
    "probe_runs": "scheduled_for < :before",
    "probe_texts": "decoded_at < :before",
    "expectation_pairs": "computed_at < :before",
    "incidents": "closed_at < :before",
    "notifications": "attempted_at < :before",
    "schedule_runs": "scheduled_for < :before",
    "reports": "created_at < :before",
    "redrives": "redriven_at < :before",
    # The newest acceptance of a level says which measurements the next ones are compared with.
    "drift_events": """
        closed_at < :before AND (
            accepted_at IS NULL OR EXISTS (
                SELECT FROM drift_events AS newer
                WHERE newer.task = drift_events.task AND newer.drafter = drift_events.drafter
                    AND newer.accepted_at > drift_events.accepted_at
            )
        )""",
    "acceptance_hourly": "bucket < :before",
    "acceptance_daily": "bucket < :before",
}
#: What `RetentionStore.drop` takes.
TABLES: Final = tuple(_TOO_OLD)
