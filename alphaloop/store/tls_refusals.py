"""Why a connection to Postgres over TLS was not made, and what to set.

libpq gives no code for these, only a text, which it does not translate in the build that psycopg[binary] brings. A text
that is not known here leaves the ordinary hint.
"""

from __future__ import annotations

from typing import Final

#: A part of libpq's or the server's text, and what to do. https://www.postgresql.org/docs/current/libpq-ssl.html
_KNOWN: Final = (
    (
        "certificate verify failed",
        "the server's certificate was not signed by a certificate in sslrootcert of postgres.url (DATABASE_URL): set "
        "sslrootcert to the file of the CA that signed it, or to `system` for the CAs that this machine trusts",
    ),
    (
        "does not match host name",
        "sslmode=verify-full wants a host in postgres.url (DATABASE_URL) that the server's certificate names; "
        "hostaddr=… may give the address beside it",
    ),
    (
        "server does not support SSL",
        "postgres.url (DATABASE_URL) asks for TLS with sslmode, and the server speaks none: set ssl = on in "
        "postgresql.conf, or connect to the port that speaks it",
    ),
    (
        "root certificate file",
        "sslmode=verify-full and verify-ca want sslrootcert=FILE in postgres.url (DATABASE_URL), or sslrootcert=system "
        "for the CAs that this machine trusts",
    ),
    (
        "requires a valid client certificate",
        "the server asks for a certificate of its clients: set sslcert=FILE and sslkey=FILE in postgres.url "
        "(DATABASE_URL)",
    ),
    (
        "no encryption",
        "the server takes this user over TLS only (hostssl in pg_hba.conf): set sslmode=verify-full and sslrootcert in "
        "postgres.url (DATABASE_URL)",
    ),
    ("certificate file", "sslcert in postgres.url (DATABASE_URL) names a file that cannot be read"),
    ("private key file", "sslkey in postgres.url (DATABASE_URL) names a file that only its owner may read (chmod 600)"),
)


def tls_hint(told: str) -> str | None:
    """What to set, if TLS is why a connection failed; `told` is libpq's text."""
    return next((hint for part, hint in _KNOWN if part in told), None)
