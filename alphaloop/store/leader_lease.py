"""Leadership by a row with a time limit. It needs no session, so it holds behind a pooler in transaction mode too."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import text

from alphaloop.errors import StoreError
from alphaloop.store.database import Database
from alphaloop.store.exchange import driver_of
from alphaloop.store.terms import SCHEDULER, Term, begin_term

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
