"""A pool of connections to Postgres, and the conversion of the driver's exceptions to ours."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import psycopg
from pydantic import SecretStr
from sqlalchemy import Connection, TextClause, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from alphaloop.errors import ConfigError, SchemaMismatch, StoreError
from alphaloop.store.refusals import store_error
from alphaloop.store.session_limits import DEFAULT_LIMITS, SessionLimits

#: The revisions of migrations/ that this code knows and can run on, oldest first. A rolling upgrade migrates first and
#: then replaces the processes, so this code also meets later revisions: whether it can run on one of those says the
#: database, in code_revisions.
SUPPORTED_REVISIONS: Final = ("0003",)

_REVISION: Final = text("SELECT version_num FROM alembic_version")
_SERVES: Final = text("SELECT revision FROM code_revisions WHERE revision = :revision")
_DRIVER: Final = "postgresql+psycopg"
_UNDEFINED_TABLE: Final = "42P01"


class Database:
    """Connections to one database. Threads share it; close it once."""

    def __init__(
        self,
        url: SecretStr,
        *,
        pool_size: int = 5,
        connect_timeout_s: int = 10,
        limits: SessionLimits = DEFAULT_LIMITS,
    ) -> None:
        """Connects at the first use, not here. Raises ConfigError for a URL that is not Postgres's."""
        parsed = parse_url(url)
        self.redacted_url: Final = redacted(parsed)
        self._url = parsed
        self._connect_args: dict[str, Any] = {
            "connect_timeout": connect_timeout_s,
            "application_name": "alphaloop",
            **limits.connecting,
        }
        self._engine = create_engine(
            parsed,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=connect_timeout_s,
            hide_parameters=True,
            connect_args=self._connect_args,
        )
        event.listen(self._engine, "checkout", _refuse_if_cut)
        self._is_closed = threading.Event()
        event.listen(self._engine, "checkin", partial(_close_if, self._is_closed))
        self._guard: Callable[[Connection], None] | None = None
        self._limits = limits
        settings = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in limits.parameters.items())
        self._set_limits = text(f"SELECT {settings}") if limits.through_pooler else None
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    def guarded(self, guard: Callable[[Connection], None]) -> Self:
        """The same connections, but every transaction begins with `guard`, which refuses it by raising."""
        guarded = copy(self)
        guarded._guard = guard
        return guarded

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One transaction: committed at the end, rolled back on any exception.

        Raises StoreUnavailable for what passes by itself: the server does not answer, the connection broke (whether the
        transaction committed is then unknown: read again), a lock is held, the disk is full. Raises StoreError for
        everything else that Postgres refuses; see alphaloop.store.refusals.
        """
        try:
            with self._engine.begin() as connection:
                if self._set_limits is not None:
                    connection.execute(self._set_limits)
                if self._guard is not None:
                    self._guard(connection)
                yield connection
        except (SQLAlchemyError, psycopg.Error, UnicodeEncodeError) as error:
            # Not chained, because the driver's text quotes rows, and rows hold prompts.
            raise store_error(error, self.redacted_url) from None

    @contextmanager
    def single(self) -> Iterator[Connection]:
        """For one statement that is a transaction by itself: the server is spoken to once, not three times.

        With a guard or a pooler it is one statement of a transaction. Raises as `begin` does.
        """
        if self._guard is not None or self._set_limits is not None:
            with self.begin() as connection:
                yield connection
            return
        try:
            with self._autocommit.connect() as connection:
                yield connection
        except (SQLAlchemyError, psycopg.Error, UnicodeEncodeError) as error:
            raise store_error(error, self.redacted_url) from None

    @property
    def address(self) -> str:
        """Host, port and name of the database, for a person; nothing of the login."""
        host, port = self._url.host or "local socket", f":{self._url.port}" if self._url.port else ""
        return f"{host}{port}/{self._url.database or ''}"

    @property
    def keeps_sessions(self) -> bool:
        """Whether a connection is one session of the server, so that it can listen and keep locks."""
        return not self._limits.through_pooler

    def dedicated(self) -> psycopg.Connection:
        """A connection outside the pool, in autocommit, for what must outlive transactions. The caller closes it."""
        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        try:
            return psycopg.connect(url, autocommit=True, **self._connect_args)
        except psycopg.Error as error:
            raise store_error(error, self.redacted_url) from None

    def check_revision(self) -> str:
        """The database's schema revision; raises SchemaMismatch unless this code can run on it."""
        found = self._scalar(_REVISION)
        if found in SUPPORTED_REVISIONS or (found and self.serves(SUPPORTED_REVISIONS[-1])):
            return str(found)
        raise SchemaMismatch(
            f"expected schema revision {' or '.join(SUPPORTED_REVISIONS)}, or a later one that code of revision "
            f"{SUPPORTED_REVISIONS[-1]} can run on, found {found or 'none'} in {self.redacted_url}",
            hint="alphaloop migrate" if found is None else "alphaloop migrate; or run the release that migrated",
        )

    def serves(self, code_revision: str) -> bool:
        """Whether code whose newest revision is `code_revision` can run on the schema as it is now."""
        return self._scalar(_SERVES, revision=code_revision) is not None

    def _scalar(self, query: TextClause, **parameters: str) -> Any:
        """The first value; None where there is no row or no such table."""
        try:
            with self.begin() as connection:
                return connection.execute(query, parameters).scalar()
        except StoreError as error:
            if _UNDEFINED_TABLE not in error.message:
                raise
            return None

    def close(self) -> None:
        """Close every connection; one that a thread still uses is closed when the thread has finished with it."""
        self._is_closed.set()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_if(is_closed: threading.Event, connection: psycopg.Connection | None, record: ConnectionPoolEntry) -> None:
    if is_closed.is_set() and connection is not None:
        record.close()


def _refuse_if_cut(connection: psycopg.Connection, record: object, proxy: object) -> None:
    """Have the pool replace a connection that the server has ended.

    The server sends a last message or closes the socket, and sends nothing else to an idle connection, but a change of
    its settings. So the socket tells, and no question needs to be sent each time a connection is taken.
    """
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    if waiting.poll(0):
        raise DisconnectionError


def redacted(url: URL) -> str:
    """The URL as psql takes it, to be shown: without its password and parameters, which may hold passwords too."""
    return url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)


def parse_url(url: SecretStr) -> URL:
    """The URL with the driver spelt out: `postgres://` and `postgresql://` mean psycopg 3. Raises ConfigError."""
    hint = "postgresql://user:password@host:5432/name"
    try:
        parsed = make_url(url.get_secret_value())
    except (ArgumentError, ValueError):
        raise ConfigError("expected the URL of a Postgres database, found something else", hint=hint) from None
    if parsed.drivername not in ("postgres", "postgresql", _DRIVER):
        raise ConfigError(f"expected a URL that starts with postgresql://, found {parsed.drivername}://", hint=hint)
    return parsed.set(drivername=_DRIVER)
