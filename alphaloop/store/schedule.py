"""Scheduled runs, each once, and the lease that makes one process of several the leader.

The lease is a row with a time limit. It needs no session, so it holds behind a pooler in transaction mode too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr
from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.store.database import Database, parse_url, redacted, store_error
from alphaloop.store.exchange import driver_of
from alphaloop.store.terms import SCHEDULER, Term, begin_term
from alphaloop.tables import schedule_runs


class ScheduleStore:
    """The runs that were due. A run inserts its row first, so that it happens once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, schedule_id: str, scheduled_for: datetime, owner: str, now: datetime) -> bool:
        """Take a run; False when somebody has or had it."""
        statement = (
            insert(schedule_runs)
            .values(schedule_id=schedule_id, scheduled_for=scheduled_for, owner=owner, started_at=now)
            .on_conflict_do_nothing()
            .returning(schedule_runs.c.id)
        )
        with self._database.begin() as connection:
            return connection.execute(statement).first() is not None

    def finish(self, schedule_id: str, scheduled_for: datetime, outcome: Mapping[str, Any], now: datetime) -> None:
        """Record that a run ended, with its counts or with `error`."""
        statement = (
            update(schedule_runs)
            .where(schedule_runs.c.schedule_id == schedule_id, schedule_runs.c.scheduled_for == scheduled_for)
            .values(finished_at=now, outcome=dict(outcome))
        )
        with self._database.begin() as connection:
            connection.execute(statement)

    def last_finished(self, schedule_id: str) -> tuple[datetime, Mapping[str, Any]] | None:
        """The newest run that ended: what it was due for, and its outcome."""
        query = (
            select(schedule_runs.c.scheduled_for, schedule_runs.c.outcome)
            .where(schedule_runs.c.schedule_id == schedule_id, schedule_runs.c.finished_at.is_not(None))
            .order_by(schedule_runs.c.scheduled_for.desc())
            .limit(1)
        )
        with self._database.begin() as connection:
            row = connection.execute(query).first()
        return (row.scheduled_for, row.outcome or {}) if row else None

    def newest(self) -> tuple[datetime, datetime | None, Mapping[str, Any]] | None:
        """Of the run that was started last, of any schedule: its start, its end, and its outcome so far."""
        runs = schedule_runs.c
        query = select(runs.started_at, runs.finished_at, runs.outcome).order_by(runs.id.desc()).limit(1)
        with self._database.begin() as connection:
            row = connection.execute(query).first()
        return (row.started_at, row.finished_at, row.outcome or {}) if row else None

    def succeeded(self, since: datetime, until: datetime) -> list[datetime]:
        """When the runs in [since, until] that ended without an error were started, of every schedule; oldest first."""
        runs = schedule_runs.c
        query = (
            select(runs.started_at)
            .where(runs.started_at >= since, runs.started_at <= until)
            .where(runs.finished_at.is_not(None), ~runs.outcome.has_key("error"))
            .order_by(runs.started_at)
        )
        with self._database.begin() as connection:
            return list(connection.execute(query).scalars())


class LeaderLease:
    """The lease that makes one process of several the leader, which renews it at each check. One thread uses it.

    A leader that died is followed after `lease_s`. One that was only slow writes nothing any more: its term has ended.
    """

    def __init__(self, database: Database, owner: str, *, lease_s: float) -> None:
        """`owner` must be new for each process; `lease_s` longer than some checks."""
        self._database = database
        self._given: dict[str, Any] = {"role": SCHEDULER, "owner": owner, "lease_s": lease_s}

    def try_acquire(self) -> bool:
        """Take the lease if it is free, without waiting for its end. Raises StoreError."""
        with self._database.begin() as connection:
            return connection.execute(_TAKE, self._given).first() is not None

    def begin_term(self) -> Term:
        """Number this leadership, so that what the leader before still tries to write is refused. Raises StoreError."""
        with self._database.begin() as connection:
            return begin_term(driver_of(connection))

    def is_held(self) -> bool:
        """Renew the lease; False if it has run out, or the database does not answer."""
        try:
            with self._database.begin() as connection:
                return connection.execute(_RENEW, self._given).first() is not None
        except StoreError:
            return False

    def release(self) -> None:
        """Let another process lead at once; without a database the lease runs out."""
        try:
            with self._database.begin() as connection:
                connection.execute(_GIVE_UP, self._given)
        except StoreError:
            return


#: Any fixed number: every scheduler of this database takes the same lock.
LEADER_LOCK: Final = 0x616C7068616D65
# A leader without a network must notice it soon, because another one takes over: the connection ends after about 20 s.
_KEEPALIVE: Final[dict[str, int]] = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


class AdvisoryLock:
    """A lock tied to a connection outside the pool: it ends with this process.

    One thread uses it. Only `try_acquire` and `begin_term` raise: a broken connection is a lost lock.
    """

    def __init__(
        self, url: SecretStr, key: int = LEADER_LOCK, *, connect_timeout_s: int = 10, term_timeout_s: float = 5.0
    ) -> None:
        """`term_timeout_s`: how long `begin_term` waits for a transaction of the leader before."""
        parsed = parse_url(url)
        self._where = redacted(parsed)
        self._conninfo = SecretStr(parsed.set(drivername="postgresql").render_as_string(hide_password=False))
        self._connect_timeout_s = connect_timeout_s
        self._lock_timeout = f"{term_timeout_s * 1000:.0f}ms"
        self._key = key
        self._connection: psycopg.Connection[Any] | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free, without waiting. Raises StoreUnavailable, StoreError."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            row = self._connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,)).fetchone()
        except psycopg.Error as error:
            self.release()
            raise store_error(error, self._where) from None
        if not row or not row[0]:
            self.release()
            return False
        return True

    def begin_term(self) -> Term:
        """Number this leadership, so that what the leader before still tries to write is refused.

        Raises StoreUnavailable, and StoreError while a transaction of that leader goes on; the lock is then released.
        """
        if self._connection is None:
            raise StoreUnavailable(f"no connection to {self._where} holds the leader's lock")
        try:
            self._connection.execute("SELECT set_config('lock_timeout', %s, false)", (self._lock_timeout,))
            return begin_term(self._connection)
        except psycopg.Error as error:
            self.release()
            raise store_error(error, self._where) from None

    def is_held(self) -> bool:
        """Ask the server whether this connection still holds the lock."""
        if self._connection is None:
            return False
        try:
            row = self._connection.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()"
                " AND (classid::bigint << 32) | objid::bigint = %s",
                (self._key,),
            ).fetchone()
        except psycopg.Error:
            self.release()
            return False
        return bool(row and row[0])

    def release(self) -> None:
        """Release the lock by closing its connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def backend_pid(self) -> int | None:
        """The server process behind the lock, as in pg_stat_activity; None without a connection."""
        return self._connection.info.backend_pid if self._connection is not None else None

    def _connect(self) -> psycopg.Connection[Any]:
        settings: dict[str, str | int] = {"connect_timeout": self._connect_timeout_s, **_KEEPALIVE}
        settings["application_name"] = "alphaloop-leader"
        return psycopg.connect(make_conninfo(self._conninfo.get_secret_value(), **settings), autocommit=True)


_LEASE_END: Final = "clock_timestamp() + make_interval(secs => :lease_s)"
_TAKE: Final = text(f"""
    INSERT INTO leader_leases AS held (role, owner, expires_at) VALUES (:role, :owner, {_LEASE_END})
    ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at
    WHERE held.expires_at <= clock_timestamp() OR held.owner = excluded.owner
    RETURNING role
""")  # noqa: S608 - no values
_RENEW: Final = text(f"""
    UPDATE leader_leases SET expires_at = {_LEASE_END}
    WHERE role = :role AND owner = :owner AND expires_at > clock_timestamp() RETURNING role
""")  # noqa: S608 - no values
_GIVE_UP: Final = text("DELETE FROM leader_leases WHERE role = :role AND owner = :owner")
