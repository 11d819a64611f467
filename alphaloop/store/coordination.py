"""What processes agree on: runs that happen once, who leads, and the Kafka that their database belongs to.

The lease of a leader is a row with a time limit. It needs no session, so it holds through a pooler in transaction mode
too. A leader that stood still finds out that its lease ran out only when it looks, so each leader has a number, its
term, and writes nothing once there is a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, select, text, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.errors import ConfigError, LeadershipLost, StoreError
from alphaloop.store.database import Database, Store
from alphaloop.tables import schedule_runs


class ScheduleStore(Store):
    """The runs that were due. A run inserts its row first, so that it happens once."""

    def claim(self, schedule_id: str, scheduled_for: datetime, owner: str, now: datetime) -> bool:
        """Take a run; False when another process has or had it."""
        statement = (
            insert(schedule_runs)
            .values(schedule_id=schedule_id, scheduled_for=scheduled_for, owner=owner, started_at=now)
            .on_conflict_do_nothing()
            .returning(schedule_runs.c.id)
        )
        return self._database.row(statement) is not None

    def finish(self, schedule_id: str, scheduled_for: datetime, outcome: Mapping[str, Any], now: datetime) -> None:
        """Record that a run ended, with its counts or with `error`."""
        statement = (
            update(schedule_runs)
            .where(schedule_runs.c.schedule_id == schedule_id, schedule_runs.c.scheduled_for == scheduled_for)
            .values(finished_at=now, outcome=dict(outcome))
        )
        self._database.change(statement)

    def last_finished(self, schedule_id: str) -> tuple[datetime, Mapping[str, Any]] | None:
        """The newest run that ended: what it was due for, and its outcome."""
        query = (
            select(schedule_runs.c.scheduled_for, schedule_runs.c.outcome)
            .where(schedule_runs.c.schedule_id == schedule_id, schedule_runs.c.finished_at.is_not(None))
            .order_by(schedule_runs.c.scheduled_for.desc())
            .limit(1)
        )
        row = self._database.row(query)
        return (row.scheduled_for, row.outcome or {}) if row else None

    def newest(self) -> tuple[datetime, datetime | None, Mapping[str, Any]] | None:
        """The run that was started last, of any schedule: its start, its end, and its outcome so far."""
        runs = schedule_runs.c
        query = select(runs.started_at, runs.finished_at, runs.outcome).order_by(runs.id.desc()).limit(1)
        row = self._database.row(query)
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
        return list(self._database.scalars(query))


SCHEDULER: Final = "scheduler"
_BEGIN: Final = text("""
    INSERT INTO leader_terms AS led (role, term) VALUES (:role, 1)
    ON CONFLICT (role) DO UPDATE SET term = led.term + 1, began_at = now() RETURNING term
""")
# Locked until the transaction ends: the next term begins before or after it, never in between.
_CURRENT: Final = text("SELECT term FROM leader_terms WHERE role = :role FOR SHARE")


@dataclass(frozen=True, slots=True)
class Term:
    """The time of one leader."""

    number: int

    def check(self, connection: Connection) -> None:
        """Keep the term from ending before the caller's transaction does. Raises LeadershipLost if it has ended."""
        current = connection.execute(_CURRENT, {"role": SCHEDULER}).scalar()
        if current != self.number:
            raise LeadershipLost(f"term {self.number} of the {SCHEDULER} has ended, term {current} has begun")


class LeaderLease:
    """The lease that makes one process of several the leader, which renews it at each check. One thread uses it.

    A leader that died is followed after `lease_s`. One that was only slow writes nothing any more: its term has ended.
    Other roles than the scheduler's have no terms: whoever takes one over does again what is harmless to do twice.
    """

    def __init__(self, database: Database, owner: str, *, lease_s: float, role: str = SCHEDULER) -> None:
        """`owner` must be new for each process; `lease_s` longer than some checks."""
        self._database = database
        self._given: dict[str, Any] = {"role": role, "owner": owner, "lease_s": lease_s}

    def try_acquire(self) -> bool:
        """Take the lease if it is free, without waiting for its end. Raises StoreError."""
        return self._database.row(_TAKE, self._given) is not None

    def begin_term(self) -> Term:
        """Number this leadership, so that what the leader before still tries to write is refused. Raises StoreError.

        Waits for transactions of the term before, at most as long as the session's `lock_timeout`.
        """
        return Term(self._database.scalar(_BEGIN, {"role": SCHEDULER}))

    def is_held(self) -> bool:
        """Renew the lease; False if it has run out, or the database does not answer."""
        try:
            return self._database.row(_RENEW, self._given) is not None
        except StoreError:
            return False

    def release(self) -> None:
        """Let another process lead at once; without a database the lease runs out."""
        try:
            self._database.change(_GIVE_UP, self._given)
        except StoreError:
            return


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


_READ: Final = text("SELECT id, kafka_cluster AS cluster, kafka_prefix AS prefix FROM installation")
_SET: Final = "kafka_cluster = :cluster, kafka_prefix = :prefix, noted_at = now()"
_NOTE: Final = text(f"UPDATE installation SET {_SET} WHERE kafka_cluster IS NULL")  # noqa: S608 - no values
_ADOPT: Final = text(f"""
    UPDATE installation SET id = gen_random_uuid(), {_SET}
    WHERE (kafka_cluster, kafka_prefix) IS DISTINCT FROM (CAST(:cluster AS text), CAST(:prefix AS text))
""")  # noqa: S608 - no values


class InstallationStore(Store):
    """The one row of its table."""

    def belong(self, cluster: str, prefix: str) -> str:
        """Note this cluster and `kafka.prefix` if none is noted; returns the database's id.

        Raises ConfigError where another cluster or prefix is noted, and StoreError.
        """
        if self._database.one(_READ).cluster is None:
            self._database.change(_NOTE, {"cluster": cluster, "prefix": prefix})
        return self.expect(cluster, prefix)

    def expect(self, cluster: str, prefix: str) -> str:
        """The database's id. Raises ConfigError where another cluster or prefix is noted, and StoreError."""
        noted = self._database.one(_READ)
        if noted.cluster is not None and (noted.cluster, noted.prefix) != (cluster, prefix):
            raise ConfigError(
                f"{self._database.redacted_url} belongs to the Kafka cluster {noted.cluster} with kafka.prefix "
                f"{noted.prefix!r}, found the cluster {cluster} with {prefix!r}",
                hint="connect the Kafka and the database that belong together; after a move, or a restore from a "
                f"backup: alphaloop migrate --adopt-cluster {cluster}",
            )
        return str(noted.id)

    def adopt(self, cluster: str, prefix: str) -> bool:
        """Note another cluster or prefix, under a new id, because a copy is another database; whether it is another."""
        return self._database.change(_ADOPT, {"cluster": cluster, "prefix": prefix}) > 0
