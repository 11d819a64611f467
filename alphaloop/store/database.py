"""Connections to Postgres: transactions, the database's clock, notices, and what errors mean as errors of our tree.

The hot path speaks to the driver (`driver_of`), because SQLAlchemy takes 25 to 80 µs for a statement, and hands over
many rows as one parameter (`RowSet`), because a placeholder for each value would cost 60 µs a row.

The SQLSTATE decides what an error means, never a text, because a server may speak another language. A connection that
failed has none.
"""

from __future__ import annotations

import json
import math
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg import sql
from pydantic import SecretStr
from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    FromClause,
    Text,
    TextClause,
    bindparam,
    create_engine,
    event,
    func,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from alphaloop.errors import (
    ConfigError,
    SchemaMismatch,
    StoreBusy,
    StoreError,
    StoreLoginRefused,
    StoreUnavailable,
    StoreValueRefused,
)
from alphaloop.settings.processes import SessionLimits

#: The revisions of migrations/ that this code knows and can run on, oldest first. A rolling upgrade migrates first and
#: then replaces the processes, so this code also meets later revisions: whether it can run on one of those says the
#: database, in code_revisions.
SUPPORTED_REVISIONS: Final = ("0015",)

#: What to do with a database at a revision that this code does not know.
UNKNOWN_REVISION: Final = (
    "run the release that migrated; a database of an earlier checkout, from before any release, is not migrated: "
    "create a new one"
)

#: Every transaction below it has ended. Changes that are not visible yet belong to this transaction or a later one.
OLDEST_RUNNING: Final = text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
_IS_THERE: Final = text("SELECT to_regclass(:name) IS NOT NULL")
_REVISION: Final = text("SELECT version_num FROM alembic_version")
_SERVES: Final = text("SELECT revision FROM code_revisions WHERE revision = :revision")
_DRIVER: Final = "postgresql+psycopg"
_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]
_DEFAULT_LIMITS: Final = SessionLimits()


_Kind = TypeVar("_Kind")


def columns_of(table: FromClause, kind: type[Any], *left_out: str) -> list[ColumnElement[Any]]:
    """The columns that are named like the fields of a dataclass."""
    return [table.c[field.name] for field in fields(kind) if field.name not in left_out]


def of_row(kind: type[_Kind], row: Any, /, **others: Any) -> _Kind:
    """A dataclass from a row whose columns are named like its fields; `others` are fields that do not come from it."""
    names: Any = fields(cast(Any, kind))
    return kind(**{field.name: getattr(row, field.name) for field in names if field.name not in others}, **others)


def values_of(one: Any, *left_out: str) -> dict[str, Any]:
    """A row from a dataclass whose fields are named like the columns."""
    return {field.name: getattr(one, field.name) for field in fields(one) if field.name not in left_out}


def any_of(names: Iterable[str]) -> Any:
    """One parameter for any number of texts, so that the statement is prepared once."""
    return func.any(bindparam(None, list(names), ARRAY(Text)))


def driver_of(connection: Connection) -> psycopg.Connection:
    """The driver's connection, in the same transaction. Raises psycopg.Error, which `Database.begin` converts."""
    return cast(psycopg.Connection, connection.connection.driver_connection)


class RowSet:
    """Many rows as one parameter, `rows`: `INSERT … SELECT … FROM json_to_recordset(…)` reads them as `given`.

    The text of such a statement does not depend on the number of rows, so the driver parses it once and Postgres
    prepares it once.
    """

    def __init__(self, columns: Sequence[Column[Any]]) -> None:
        self.names: Final = tuple(column.name for column in columns)
        types = ", ".join(f"{column.name} {column.type.compile(_DIALECT)}" for column in columns)
        self.source: Final = f"json_to_recordset(CAST(%(rows)s AS json)) AS given({types})"
        self.columns: Final = ", ".join(self.names)
        self.given: Final = ", ".join(f"given.{name}" for name in self.names)

    @staticmethod
    def parameter(rows: Iterable[Mapping[str, Any]]) -> str:
        """The rows as the statement takes them. Values are what the columns hold, in Python's types."""
        return json.dumps(list(rows), default=_as_json, ensure_ascii=False)


def _as_json(value: object) -> str:
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"no column holds {type(value).__name__}")


#: Connections of a worker, and of a scheduler: a thread that waits for one loses milliseconds, and the server has few.
POOL_SIZE: Final = 2
#: Age at which a connection is replaced, because one that only reads does not notice that another server writes now.
_LONGEST_S: Final = 600.0


class Database:
    """Connections to one database. Threads share it; close it once."""

    def __init__(
        self,
        url: SecretStr,
        *,
        pool_size: int = 5,
        connect_timeout_s: int = 10,
        limits: SessionLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Connects at the first use, not here. Raises ConfigError for a URL that is not Postgres's."""
        parsed = parse_url(url)
        self.redacted_url: Final = redacted(parsed)
        self._url = parsed
        self._engine = create_engine(
            parsed,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=connect_timeout_s,
            pool_recycle=_LONGEST_S,
            hide_parameters=True,
            isolation_level="READ COMMITTED",
            creator=self._connect,
        )
        self._connect_args: Final = {
            **self._engine.dialect.create_connect_args(parsed)[1],
            "connect_timeout": connect_timeout_s,
            "application_name": "alphaloop",
            **limits.connecting,
        }
        self._pooled: Final = _Pooled(self._engine)
        self._guard: Callable[[Connection], None] | None = None
        self._limits = limits
        self._set_limits = text(_setting(limits, is_local=True)) if limits.through_pooler else None
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
        everything else that Postgres refuses; see `store_error`.
        """
        with self._our_errors(), self._engine.begin() as connection:
            if self._set_limits is not None:
                connection.execute(self._set_limits)
            if self._guard is not None:
                self._guard(connection)
            yield connection

    @contextmanager
    def single(self) -> Iterator[Connection]:
        """For one statement that is a transaction by itself: the server is spoken to once, not three times.

        With a guard or a pooler it is one statement of a transaction. Raises as `begin` does.
        """
        if self._guard is not None or self._set_limits is not None:
            with self.begin() as connection:
                yield connection
            return
        with self._our_errors(), self._autocommit.connect() as connection:
            yield connection

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        """The driver's errors as ours; not chained, because the driver's text quotes rows, and rows hold prompts.

        Only after an error about locks or values is a connection used again: any other may be one of its server.
        """
        try:
            yield
        except (SQLAlchemyError, psycopg.Error, UnicodeEncodeError) as error:
            ours = store_error(error, self.redacted_url)
            if _exceeds_limit(error) and self._is_out_of_transactions():
                ours = StoreUnavailable(ours.message, hint="VACUUM every database of the server")
            if not isinstance(ours, (StoreBusy, StoreValueRefused)):
                self._pooled.number += 1
            raise ours from None

    def _is_out_of_transactions(self) -> bool:
        """Whether the server starts no transaction that writes. It says so as it says that a row is too large."""
        try:
            with self._autocommit.connect() as connection:
                return connection.scalar(text("SELECT pg_current_xact_id()")) is None
        except (SQLAlchemyError, psycopg.Error) as error:
            return _exceeds_limit(error)

    def rows(self, query: Executable, given: Mapping[str, Any] | None = None) -> list[Any]:
        """The rows of one statement that is a transaction by itself. Raises as `begin` does."""
        with self.single() as connection:
            return list(connection.execute(query, given))

    def row(self, query: Executable, given: Mapping[str, Any] | None = None) -> Any:
        """The first of its rows; None where it has none."""
        return next(iter(self.rows(query, given)), None)

    def one(self, query: Executable, given: Mapping[str, Any] | None = None) -> Any:
        """The row of a statement that has exactly one."""
        (row,) = self.rows(query, given)
        return row

    def scalar(self, query: Executable, given: Mapping[str, Any] | None = None) -> Any:
        """The first value of such a row."""
        return self.one(query, given)[0]

    def scalars(self, query: Executable, given: Mapping[str, Any] | None = None) -> list[Any]:
        """The first value of each row."""
        return [row[0] for row in self.rows(query, given)]

    def change(
        self, statement: Executable, given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Carry out a statement, or one for each of `given`, in a transaction; returns how many rows it changed."""
        with self.begin() as connection:
            return connection.execute(statement, given).rowcount

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
        with self._our_errors():
            return self._connect(autocommit=True)

    def _connect(self, *, autocommit: bool = False) -> psycopg.Connection:
        """A new connection. What our statements rely on holds, whatever others have set for the database or the role.

        Parameters that libpq sends, such as those of PG* variables, win over its `options`: so they are set afterwards.
        """
        connection = psycopg.connect(**self._connect_args, autocommit=True)
        try:
            if not self._limits.through_pooler:
                connection.execute(_setting(self._limits, is_local=False))
            connection.autocommit = autocommit
        except BaseException:
            connection.close()
            raise
        return connection

    def check_revision(self) -> str:
        """The database's schema revision; raises SchemaMismatch unless this code can run on it."""
        revision = self._scalar("alembic_version", _REVISION)
        if revision in SUPPORTED_REVISIONS or (revision and self.serves(SUPPORTED_REVISIONS[-1])):
            return str(revision)
        raise SchemaMismatch(
            f"expected schema revision {' or '.join(SUPPORTED_REVISIONS)}, or a later one that code of revision "
            f"{SUPPORTED_REVISIONS[-1]} can run on, found {revision or 'none'} in {self.redacted_url}",
            hint=UNKNOWN_REVISION if revision else "alphaloop migrate; or the search_path of this user leads elsewhere",
        )

    def serves(self, code_revision: str) -> bool:
        """Whether code whose newest revision is `code_revision` can run on the schema as it is now."""
        return self._scalar("code_revisions", _SERVES, revision=code_revision) is not None

    def _scalar(self, table: str, query: TextClause, **parameters: str) -> Any:
        """The first value; None where there is no row or no such table."""
        if not self.scalar(_IS_THERE, {"name": table}):
            return None
        row = self.row(query, parameters)
        return None if row is None else row[0]

    def close(self) -> None:
        """Close every connection; one that a thread still uses is closed when the thread has finished with it."""
        self._pooled.is_closed = True
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store:
    """Reads and writes some tables of a database. Threads share it as they share the connections."""

    def __init__(self, database: Database) -> None:
        self._database = database


class _Pooled:
    """Which connections of a pool are used again. Threads share it."""

    def __init__(self, engine: Engine) -> None:
        self.is_closed = False
        self.number = 0  #: connections that were first taken under another number are replaced
        event.listen(engine, "checkout", self._taken)
        event.listen(engine, "checkin", self._returned)

    def _taken(self, connection: psycopg.Connection, record: ConnectionPoolEntry, proxy: object) -> None:
        """Have the pool replace a connection that is of an earlier number, or that the server has ended.

        The server sends a last message or closes the socket, and sends nothing else to an idle connection, but a change
        of its settings. So the socket shows it, and no question needs to be sent each time a connection is taken.
        """
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        if record.info.setdefault("number", self.number) != self.number or waiting.poll(0):
            raise DisconnectionError

    def _returned(self, connection: psycopg.Connection | None, record: ConnectionPoolEntry) -> None:
        if self.is_closed and connection is not None:
            record.close()


def _setting(limits: SessionLimits, *, is_local: bool) -> str:
    """The statement that sets the parameters: for a session, or for the transaction that it is the first of."""
    parameters = limits.parameters.items()
    return "SELECT " + ", ".join(f"set_config('{name}', '{value}', {is_local})" for name, value in parameters)


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


#: A slower answer says too little about when it was given: the offset measured before stays.
_SLOWEST_ANSWER_S: Final = 1.0


class DatabaseClock:
    """Tells the database's time from one measured offset to this machine's monotonic clock. Threads share it.

    Deadlines must not depend on the clock of the machine that a worker runs on.
    """

    def __init__(self, database: Database, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._monotonic = monotonic
        self._measured: tuple[datetime, float] | None = None  #: a moment by the database, and the same by this machine

    def now(self) -> datetime:
        """The time, in UTC, right to half a round trip. The first call asks the database: it may raise StoreError."""
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
        instant: datetime = moment.astimezone(UTC)
        if self._measured is None:
            self._measured = instant, (asked_at + answered_at) / 2
        elif answered_at - asked_at <= _SLOWEST_ANSWER_S:
            self._measured = followed(self._measured, instant, asked_at, answered_at)
        return instant


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


#: Sent by triggers on draft_revisions and drift_events, so that a change in psql sends one too.
_DRAFTS_CHANGED: Final = "alphaloop_drafts"
#: Told by whoever writes a cancellation down.
CANCELLATIONS: Final = "alphaloop_cancellations"


class Listener:
    """Waits for notices of changes by other processes. One thread owns it; the next wait replaces a lost connection.

    A notice says only that something changed. Its receiver reads the tables, as it also does at intervals without one,
    because a broken connection loses notices. Behind a pooler in transaction mode there are none.
    """

    def __init__(self, database: Database, *channels: str) -> None:
        """Listens to these channels, or to all that there are."""
        self._database = database
        self._channels = channels or (_DRAFTS_CHANGED, CANCELLATIONS)
        self._connection: psycopg.Connection | None = None
        self._since_s = 0.0
        self._ended = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Whether there may be something new: a notice came, or the connection is new and may have missed one.

        Raises StoreUnavailable if the server does not answer or the connection broke.
        """
        if not self._database.keeps_sessions:
            self._ended.wait(timeout_s)
            return False
        if self._connection is None or time.monotonic() - self._since_s > _LONGEST_S:
            if self._connection is not None:
                self._connection.close()
            self._connection, self._since_s = self._listen(), time.monotonic()
            return True
        try:
            return bool(list(self._connection.notifies(timeout=timeout_s, stop_after=1)))
        except psycopg.Error as error:
            self.close()
            raise store_error(error, self._database.redacted_url) from None

    def close(self) -> None:
        """Give the connection back."""
        self._ended.set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _listen(self) -> psycopg.Connection:
        connection = self._database.dedicated()
        try:
            for channel in self._channels:
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        except psycopg.Error as error:
            connection.close()
            raise store_error(error, self._database.redacted_url) from None
        return connection


_NO_TABLE: Final = "alphaloop migrate; or the search_path of this user leads elsewhere"
_POOLER: Final = "set postgres.through_pooler where the URL leads to a pooler in transaction mode"
#: What an SQLSTATE means, by its longest beginning here, and what an operator can do; every other is a StoreError.
#: https://www.postgresql.org/docs/current/errcodes-appendix.html
_STATES: Final[Mapping[str, tuple[type[StoreError], str | None]]] = {
    # The values are at fault: they are malformed, break a constraint, or exceed a limit of Postgres.
    **dict.fromkeys(("22", "23", "54"), (StoreValueRefused, None)),
    # Another transaction is in the way: serialization failure, deadlock, object in use, lock not available.
    **dict.fromkeys(("40", "55006"), (StoreBusy, None)),
    "55P03": (StoreBusy, "another transaction has held the lock for 5 s"),
    # Completion unknown, an object in another state than the statement needs, operator intervention, snapshot too old.
    **dict.fromkeys(("40003", "55000", "57000", "72"), (StoreUnavailable, None)),
    "08": (StoreUnavailable, "is the server up, and the URL right?"),
    "25006": (StoreUnavailable, "the server is read-only: a standby, or default_transaction_read_only"),
    "25P03": (StoreUnavailable, "the process stood still inside a transaction for 20 s"),
    "25P04": (StoreUnavailable, "a transaction took longer than the server's transaction_timeout"),
    **dict.fromkeys(("26", "42P05"), (StoreUnavailable, _POOLER)),  # another session's prepared statements
    "53": (StoreUnavailable, "the server lacks a resource"),
    "53100": (StoreUnavailable, "the server's disk is full"),
    "53300": (StoreUnavailable, "raise max_connections, or run fewer processes"),
    "57014": (StoreUnavailable, "the statement was cancelled, or took over 1 min in a worker, 30 min in a command"),
    "57P": (StoreUnavailable, "the server was stopped, has crashed, or starts"),
    "58": (StoreUnavailable, "the server's disk or operating system fails"),
    **dict.fromkeys(("28", "3D"), (StoreLoginRefused, "check user, password and database of postgres.url")),
    "42501": (StoreError, "alphaloop migrate grants the roles their rights"),
    **dict.fromkeys(("3F", "42703", "42883", "42P01"), (StoreError, _NO_TABLE)),
    **dict.fromkeys(("XX001", "XX002"), (StoreError, "the server's data is damaged: restore a backup")),
}
#: The connection has ended with these, so nothing is known of the statement.
_GONE: Final = ("08", "57P", "25P03", "25P04")
_URL: Final = "postgres.url (DATABASE_URL)"
_LOGIN: Final = "check user, password, database and sslmode of postgres.url"
#: Parts of what libpq says of a connection that was refused, in lower case, and what to set; the first that is there
#: counts. libpq gives no code for these, only a text, which the build of psycopg[binary] does not translate. A server
#: in another language than English is not understood: its refusal is an outage.
#: https://www.postgresql.org/docs/current/libpq-ssl.html
_REFUSED: Final = {
    "certificate verify failed": f"in {_URL} set sslrootcert to the file of the CA that signed it, or to `system`",
    "does not match host name": f"sslmode=verify-full wants a host in {_URL} that the server's certificate names; "
    "hostaddr=… may give the address beside it",
    "server does not support ssl": f"{_URL} asks for TLS with sslmode: set ssl = on in postgresql.conf",
    "root certificate file": f"sslmode=verify-full and verify-ca want sslrootcert=FILE in {_URL}, or `system`",
    "requires a valid client certificate": f"the server wants one: set sslcert=FILE and sslkey=FILE in {_URL}",
    "no encryption": f"the server takes TLS only (hostssl): set sslmode=verify-full and sslrootcert in {_URL}",
    "private key file": f"sslkey in {_URL} names a file that only its owner may read (chmod 600)",
    "certificate file": f"sslcert in {_URL} names a file that cannot be read",
    **dict.fromkeys(("authentication failed", "no password supplied", "no pg_hba.conf entry"), _LOGIN),
    **dict.fromkeys(("not permitted to log in", "permission denied for database", "does not exist"), _LOGIN),
    **dict.fromkeys(("certificate", "tlsv1 alert", "wrong version number", "ssl was required"), _LOGIN),
}


def store_error(error: SQLAlchemyError | psycopg.Error | UnicodeEncodeError, where: str) -> StoreError:
    """The error of our tree for one of the driver's. Holds no parameter, no row and no password.

    `StoreUnavailable` means: wait, and do the same again. `StoreBusy` is one of these errors, and so is
    `StoreLoginRefused`, because a person may mend the login while a worker runs; a process that starts ends with it.
    `StoreValueRefused` means: leave this row out and go on. Every other `StoreError` needs a person.
    """
    if isinstance(error, UnicodeEncodeError):  # such as an argument in another encoding; it may be a prompt
        return StoreValueRefused("expected text that UTF-8 can encode, found a lone surrogate")
    if isinstance(error, PoolTimeout):
        waits = "this process waits for its own statements: pg_stat_activity says what those wait for"
        return StoreUnavailable(f"no free connection to {where}", hint=waits)
    original = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(original, psycopg.Error):
        return StoreError(f"{type(error).__name__} at {where}")
    state = original.sqlstate or ""
    said = original.diag.message_primary
    kind, hint = _meaning(state)
    broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if broken or state.startswith(_GONE) or (not state and isinstance(original, psycopg.OperationalError)):
        libpq = str(original).strip()
        failed = f"no connection to {where}: {said or (libpq.splitlines() or [type(original).__name__])[0]}"
        refused = next((hint for part, hint in _REFUSED.items() if part in libpq.lower()), None)
        if not state and refused is not None:
            return StoreLoginRefused(failed, hint=refused)
        return StoreUnavailable(failed, hint=hint or _STATES["08"][1])
    refusal = f"{where} refused a statement: {said or type(original).__name__} (SQLSTATE {state or 'unknown'})"
    # Without a state the driver refused the values itself: no text of Postgres holds the character NUL.
    is_value = not state and isinstance(original, psycopg.DataError)
    return StoreValueRefused(refusal) if is_value else kind(refusal, hint=hint)


def _exceeds_limit(error: Exception) -> bool:
    """Whether a limit of Postgres is exceeded: by a row, or by the transaction ids that are in use."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(original, psycopg.Error) and original.sqlstate == "54000"


def _meaning(state: str) -> tuple[type[StoreError], str | None]:
    known = [begin for begin in _STATES if state.startswith(begin)]
    return _STATES[max(known, key=len)] if known else (StoreError, None)
