"""What Postgres refused, as an error of our tree: what passes by itself is told apart from what is our own fault.

`StoreUnavailable` means: wait, and do the same again. The connection is gone, the disk is full, another transaction
holds a lock (`StoreBusy`), or an operator has made the server read-only. `StoreLoginRefused` is among these errors,
because somebody may mend the login while a worker runs; a process that starts ends with it. `StoreValueRefused` means:
leave this row out and go on, because Postgres never takes it. Every other `StoreError` needs a person: a right or a
table is missing.
"""

from __future__ import annotations

from typing import Final

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from alphaloop.errors import StoreBusy, StoreError, StoreLoginRefused, StoreUnavailable, StoreValueRefused
from alphaloop.store.tls_refusals import tls_hint

#: SQLSTATEs, or their first two characters, that pass by themselves, with what an operator can do meanwhile.
#: https://www.postgresql.org/docs/current/errcodes-appendix.html
_PASSING: Final = {
    "08": "is the server up, and the URL right?",  # connection exceptions
    "25006": "the server is read-only: a standby, or default_transaction_read_only",
    "25P03": "the process stood still inside a transaction, see postgres.idle_transaction_timeout_s",
    "25P04": "a transaction took longer than the server's transaction_timeout",
    "40001": None,  # serialization failure
    "40003": None,  # statement completion unknown
    "40P01": None,  # deadlock
    "53": "the server lacks a resource",
    "53100": "the server's disk is full",
    "53300": "raise max_connections, or run fewer processes",
    "55000": None,  # an object is not in the state that the statement needs
    "55006": None,  # an object is in use
    "55P03": "another transaction holds the lock for longer than postgres.lock_timeout_s",
    "57000": None,  # operator intervention
    "57014": "the statement was cancelled, or took longer than postgres.statement_timeout_s",
    "57P": "the server was stopped, has crashed, or starts",
    "58": "the server's disk or operating system fails",
}
#: Another transaction is in the way: serialization failure, deadlock, object in use, lock not available.
_BUSY: Final = ("40001", "40P01", "55006", "55P03")
#: The values are at fault: they are malformed, break a constraint, or exceed a limit of Postgres.
_VALUES: Final = ("22", "23", "54")
#: The connection is gone with these, so nothing is known of the statement.
_GONE: Final = ("08", "57P", "25P03")
#: Parts of what the server or libpq says when it refuses a login, in lower case, because libpq tells no SQLSTATE of a
#: connection that failed. A server in another language than English is not understood: its refusal is an outage.
_LOGIN_REFUSED: Final = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "not permitted to log in",
    "permission denied for database",
    "does not exist",  # a database, a role, a file of certificates
    "certificate",
    "tlsv1 alert",
    "wrong version number",  # TLS to a server that speaks none
    "ssl was required",
)


def store_error(error: SQLAlchemyError | psycopg.Error | UnicodeEncodeError, where: str) -> StoreError:
    """The error of our tree for one of the driver's. Holds no parameter, no row and no password."""
    if isinstance(
        error, UnicodeEncodeError
    ):  # such as an argument in another encoding; not shown, as it may be a prompt
        return StoreValueRefused("expected text that UTF-8 can encode, found a lone surrogate")
    if isinstance(error, PoolTimeout):
        return StoreUnavailable(f"no free connection to {where}", hint="raise postgres.pool_size")
    original = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(original, psycopg.Error):
        return StoreError(f"{type(error).__name__} at {where}")
    state = original.sqlstate or ""
    told = original.diag.message_primary
    broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if broken or state.startswith(_GONE) or (not state and isinstance(original, psycopg.OperationalError)):
        refused = tls_hint(str(original)) or _login_hint(original)
        if not state and refused is not None:
            return StoreLoginRefused(f"no connection to {where}: {_first_line(original)}", hint=refused)
        hint = _hint(state) or _PASSING["08"]
        return StoreUnavailable(f"no connection to {where}: {told or _first_line(original)}", hint=hint)
    refusal = f"{where} refused a statement: {told or type(original).__name__} (SQLSTATE {state or 'unknown'})"
    if state in _BUSY:
        return StoreBusy(refusal, hint=_hint(state))
    if state.startswith(tuple(_PASSING)):
        return StoreUnavailable(refusal, hint=_hint(state))
    # Without a state the driver refused the values itself: no text of Postgres holds the character NUL.
    if state.startswith(_VALUES) or (not state and isinstance(original, psycopg.DataError)):
        return StoreValueRefused(refusal)
    return StoreError(refusal)


def _hint(state: str) -> str | None:
    matching = [passing for passing in _PASSING if state.startswith(passing)]
    return _PASSING[max(matching, key=len)] if matching else None


def _login_hint(error: psycopg.Error) -> str | None:
    """What to check, if the server refused the login."""
    is_refused = any(part in str(error).lower() for part in _LOGIN_REFUSED)
    return "check user, password, database and sslmode of postgres.url" if is_refused else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
