"""The seam to the driver: every way a database can fail, as an error of our tree that gives nothing away."""

from __future__ import annotations

import socket

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.store.database import Database

pytestmark = pytest.mark.postgres

PASSWORD = "s3cr3t-pässword"


def test_what_people_wrote_never_reaches_the_message(database: Database) -> None:
    statement = (
        "INSERT INTO jobs (job_id, payload_sha256, task, purpose, status, attempt) VALUES (:id, '', '', '', :s, 1)"
    )
    for status, code in (("no such status", "23514"), ("a prompt with NUL \x00", "")):
        with pytest.raises(StoreError) as refusal:
            database.change(text(statement), {"id": "my secret prompt", "s": status})
        assert "secret prompt" not in str(refusal.value)
        assert "no such status" not in str(refusal.value)
        assert code in str(refusal.value)


def test_an_exception_rolls_back(database: Database) -> None:
    def fail_late() -> None:
        with database.begin() as connection:
            connection.execute(text("INSERT INTO cancellations (job_id) VALUES ('a')"))
            raise KeyError

    with pytest.raises(KeyError):
        fail_late()
    assert database.scalar(text("SELECT count(*) FROM cancellations")) == 0


def test_nobody_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: the connection is refused
        url = SecretStr(f"postgresql://u:{PASSWORD}@127.0.0.1:{taken.getsockname()[1]}/x")
        with Database(url) as database, pytest.raises(StoreUnavailable, match="no connection") as refusal:
            database.change(text("SELECT 1"))
    assert PASSWORD not in str(refusal.value)
    assert "***" in database.redacted_url
    assert PASSWORD not in database.redacted_url


def test_a_secret_among_the_parameters_of_a_url_is_not_shown() -> None:
    url = f"postgresql://u@h/d?sslmode=verify-full&sslpassword={PASSWORD}&password={PASSWORD}"
    with Database(SecretStr(url)) as database:
        assert database.redacted_url == "postgresql://u@h/d"


def test_a_wrong_password_and_a_database_that_is_not_there_are_told(database_url: SecretStr) -> None:
    login, address = database_url.get_secret_value().rsplit("@", 1)
    for wrong, told in (
        (f"postgres://alphaloop:{PASSWORD}@{address}", "password authentication failed"),
        (f"{login}@{address.rsplit('/', 1)[0]}/nowhere", "nowhere"),
    ):
        with Database(SecretStr(wrong)) as database, pytest.raises(StoreUnavailable, match=told) as refusal:
            database.change(text("SELECT 1"))
        assert PASSWORD not in str(refusal.value)


def test_a_connection_that_is_cut_in_a_transaction_is_replaced(database: Database, database_url: SecretStr) -> None:
    def lose_the_connection() -> None:
        with database.begin() as connection:
            _terminate(database_url, connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
            connection.execute(text("SELECT 1"))

    with pytest.raises(StoreUnavailable, match="terminating connection"):
        lose_the_connection()
    database.change(text("SELECT 1"))


def test_a_connection_that_is_cut_while_idle_is_not_noticed(database: Database, database_url: SecretStr) -> None:
    pid = database.scalar(text("SELECT pg_backend_pid()"))
    _terminate(database_url, pid)
    database.change(text("SELECT 1"))


def test_a_busy_pool_says_which_dial_to_turn(database_url: SecretStr) -> None:
    with Database(database_url, pool_size=1, connect_timeout_s=1) as database, database.begin():
        with pytest.raises(StoreUnavailable, match="no free connection") as refusal:
            database.change(text("SELECT 1"))
        assert "no free connection" in str(refusal.value)


def test_a_connection_that_a_thread_still_uses_is_closed_when_it_has_finished(database_url: SecretStr) -> None:
    database = Database(database_url)
    for use in (database.begin, database.single, database.guarded(lambda connection: None).begin):
        with use() as connection:
            driver = connection.connection.driver_connection
            database.close()
            assert connection.execute(text("SELECT 1")).scalar() == 1
        assert driver.closed


def _terminate(url: SecretStr, pid: int) -> None:
    with psycopg.connect(url.get_secret_value(), autocommit=True) as connection:
        # Waits until the backend is gone.
        assert connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,)).fetchone() == (True,)
