"""What the errors of Postgres and of its driver mean, as errors of our tree.

The SQLSTATE decides, never a text, because a server may speak another language. A connection that failed has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from alphaloop.errors import StoreBusy, StoreError, StoreLoginRefused, StoreUnavailable, StoreValueRefused

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


def _meaning(state: str) -> tuple[type[StoreError], str | None]:
    known = [begin for begin in _STATES if state.startswith(begin)]
    return _STATES[max(known, key=len)] if known else (StoreError, None)
