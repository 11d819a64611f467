"""TLS to a real PostgreSQL: who is let in, and what the others are told to set."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import make_url, text

from alphaloop.errors import StoreLoginRefused
from alphaloop.store.database import Database
from tests.fixtures.cli import Cli
from tests.fixtures.postgres import BY_CERTIFICATE, PASSWORD, TlsPostgres, tls_postgres

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsPostgres]:
    with tls_postgres(tmp_path_factory.mktemp("tls")) as found:
        yield found


def _is_encrypted(url: SecretStr) -> tuple[bool, bool]:
    """Of a connection of the pool, and of one outside it."""
    query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
    with Database(url, pool_size=1) as database, database.begin() as connection, database.dedicated() as other:
        row = other.execute(query).fetchone()
        return bool(connection.execute(text(query)).scalar_one()), bool(row[0])


def test_a_server_whose_certificate_is_right_is_trusted(server: TlsPostgres) -> None:
    assert _is_encrypted(server.url(sslmode="verify-full", sslrootcert=server.ca.cert)) == (True, True)


def test_a_client_with_a_certificate_is_let_in(server: TlsPostgres) -> None:
    known = partial(server.url, user=BY_CERTIFICATE, sslmode="verify-full", sslrootcert=server.ca.cert)
    assert _is_encrypted(known(sslcert=server.client.cert, sslkey=server.client.key)) == (True, True)
    assert "set sslcert=FILE and sslkey=FILE" in _refused(known())


def test_a_plain_server_is_refused_by_a_client_that_wants_tls(server: TlsPostgres, database_url: SecretStr) -> None:
    url = make_url(database_url.get_secret_value())
    wanted = url.update_query_dict({"sslmode": "verify-full", "sslrootcert": str(server.ca.cert)})
    told = _refused(SecretStr(wanted.render_as_string(hide_password=False)))
    assert "server does not support SSL" in told
    assert "set ssl = on in postgresql.conf" in told


def test_others_are_refused_and_told_what_to_set(server: TlsPostgres, tmp_path: Path) -> None:
    known = partial(server.url, sslmode="verify-full", sslrootcert=server.ca.cert)
    key = Path(shutil.copy(server.client.key, tmp_path))
    key.chmod(0o644)
    for url, *told in (
        (
            known(sslrootcert=server.other_ca.cert),
            "certificate verify failed",
            "set sslrootcert to the file of the CA that signed it",
        ),
        (
            known(host="db.example.com", hostaddr="127.0.0.1"),
            'does not match host name "db.example.com"',
            "wants a host in postgres.url (DATABASE_URL) that the server's certificate names",
        ),
        (known(sslrootcert=tmp_path / "nothing.pem"), "want sslrootcert=FILE in postgres.url"),
        (server.url(sslmode="disable"), "set sslmode=verify-full and sslrootcert"),
        (known(sslcert=server.client.cert, sslkey=key), "chmod 600"),
    ):
        found = _refused(url)
        for one in told:
            assert one in found


def test_a_command_tells_what_to_set(server: TlsPostgres, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.url(sslmode="verify-full", sslrootcert=server.other_ca.cert)
    monkeypatch.setenv("DATABASE_URL", url.get_secret_value())
    done = cli("migrate")
    assert done.code == 1
    assert "set sslrootcert" in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert PASSWORD not in done.err


def _refused(url: SecretStr) -> str:
    """What is told, with the hint; never a password."""
    with Database(url, pool_size=1) as database, pytest.raises(StoreLoginRefused) as refusal, database.begin():
        pass
    told = f"{refusal.value.message} {refusal.value.hint}"
    assert str(make_url(url.get_secret_value()).password) not in told
    return told
