"""What inference servers were, life by life: so that a restart with another model or other settings is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import JSON, Connection, TextClause, bindparam, text

from alphaloop.server_identity import ServerIdentity
from alphaloop.store.database import Database

_LIVES: Final = """
    SELECT endpoint, target_revision, engine, identity, changed, first_seen_at, last_seen_at FROM server_identities
"""
_KNOWN: Final = text(f"{_LIVES} ORDER BY last_seen_at DESC, first_seen_at DESC, endpoint")
_CHANGED: Final = text(f"""
    {_LIVES} WHERE changed IS NOT NULL AND first_seen_at > :moment ORDER BY first_seen_at, endpoint
""")
_LOCK: Final = text("SELECT pg_advisory_xact_lock(hashtextextended('server_identities', 0))")
_SEEN_AGAIN: Final = text("""
    UPDATE server_identities SET last_seen_at = now()
    WHERE endpoint = :endpoint AND target_revision = :target_revision AND engine = :engine
        AND first_seen_at = (SELECT max(first_seen_at) FROM server_identities WHERE endpoint = :endpoint)
        AND NOT :is_other
""")
_FIRST_SEEN: Final = text("""
    INSERT INTO server_identities (endpoint, target_revision, engine, identity, changed)
    VALUES (:endpoint, :target_revision, :engine, :identity, :changed)
""").bindparams(bindparam("identity", type_=JSON))


@dataclass(frozen=True, slots=True)
class ServerLife:
    """A server between two changes, and what evidence calls its model and itself."""

    endpoint: str
    target_revision: str
    engine: str
    identity: ServerIdentity
    changed: str | None  #: against the life before, in words
    first_seen_at: datetime
    last_seen_at: datetime


class ServerIdentityStore:
    """The table of servers' identities."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def naming(self) -> Iterator[Naming]:
        """A turn at naming servers. Workers take turns, so that one model does not get two names at once."""
        with self._database.begin() as connection:
            connection.execute(_LOCK)
            yield Naming(connection)

    def known(self) -> list[ServerLife]:
        """Every life of every server, the one that was seen last first."""
        with self._database.begin() as connection:
            return Naming(connection).known()

    def changed_since(self, moment: datetime) -> list[ServerLife]:
        """Lives that began after `moment` with something other than the life before, oldest first."""
        with self._database.begin() as connection:
            return _lives(connection, _CHANGED, moment=moment)


class Naming:
    """What a worker does in its turn."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def known(self) -> list[ServerLife]:
        """Every life of every server, the one that was seen last first."""
        return _lives(self._connection, _KNOWN)

    def saw(
        self, endpoint: str, identity: ServerIdentity, *, target_revision: str, engine: str, changed: str | None
    ) -> None:
        """The server was found so. Its last life goes on unless something `changed`."""
        given = {"endpoint": endpoint, "target_revision": target_revision, "engine": engine}
        again = self._connection.execute(_SEEN_AGAIN, {**given, "is_other": changed is not None})
        if not again.rowcount:
            self._connection.execute(_FIRST_SEEN, {**given, "identity": identity.as_json(), "changed": changed})


def _lives(connection: Connection, query: TextClause, **given: datetime) -> list[ServerLife]:
    rows = connection.execute(query.columns(identity=JSON), given).mappings().all()
    return [ServerLife(**{**row, "identity": ServerIdentity.from_json(row["identity"])}) for row in rows]
