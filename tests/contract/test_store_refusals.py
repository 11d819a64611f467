"""Every SQLSTATE by what is to be done: wait and repeat, leave the row out, or call a person."""

from __future__ import annotations

from contextlib import AbstractContextManager

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, text

from alphaloop.errors import StoreBusy, StoreError, StoreUnavailable, StoreValueRefused
from alphaloop.store.database import Database, driver_of

pytestmark = pytest.mark.postgres

PASSING = (
    "08000", "08006", "08P01", "25006", "40003", "53000", "53100", "53200", "53300", "53400", "55000",
    "57000", "57014", "57P01", "57P02", "57P03", "57P05", "58000", "58030",
)  # fmt: skip
EXPECTED = {
    **dict.fromkeys(PASSING, StoreUnavailable),
    **dict.fromkeys(("40001", "40P01", "55P03", "55006"), StoreBusy),
    **dict.fromkeys(("22001", "22012", "22P02", "22P05", "23502", "23505", "23514", "54000"), StoreValueRefused),
    **dict.fromkeys(("42501", "42601", "42P01", "42703", "0A000", "XX000", "P0001"), StoreError),
}


@pytest.mark.parametrize("by_driver", [False, True], ids=["sqlalchemy", "driver"])
def test_what_passes_by_itself_is_told_from_what_does_not(database: Database, by_driver: bool) -> None:
    def refuse(state: str) -> None:
        statement = f"DO $$ BEGIN RAISE EXCEPTION 'a test' USING ERRCODE = '{state}'; END $$"
        with database.begin() as connection:
            if by_driver:
                driver_of(connection).execute(statement.encode())
            else:
                connection.execute(text(statement))

    found = {}
    for state in EXPECTED:
        with pytest.raises(StoreError) as refusal:
            refuse(state)
        assert state in str(refusal.value) or state.startswith(("08", "57P")), (
            "of a connection that is gone it is not told"
        )
        assert refusal.value.__cause__ is None
        found[state] = type(refusal.value)
    assert found == EXPECTED
    assert database.scalar(text("SELECT 1")) == 1


def test_a_read_only_server_is_waited_for(database: Database) -> None:
    def write() -> None:
        with database.begin() as connection:
            connection.execute(text("SET TRANSACTION READ ONLY"))
            connection.execute(text("INSERT INTO cancellations (job_id) VALUES ('a')"))

    with pytest.raises(StoreUnavailable, match="25006") as refusal:
        write()
    assert "read-only" in (refusal.value.hint or "")


def test_a_text_that_no_column_holds_is_the_values_fault(database: Database) -> None:
    for statement in ("SELECT %s::text", "INSERT INTO cancellations (job_id) VALUES (%s)"):
        with pytest.raises(StoreValueRefused), database.begin() as connection:
            driver_of(connection).execute(statement, ["NUL \x00 inside"])


def test_a_connection_that_the_driver_found_broken_is_replaced(database: Database, database_url: SecretStr) -> None:
    """Not SQLAlchemy but the driver met the break, so the pool does not know of it."""

    def meet_it(block: AbstractContextManager[Connection]) -> None:
        with block as connection:
            driver = driver_of(connection)
            with psycopg.connect(database_url.get_secret_value()) as other:
                other.execute("SELECT pg_terminate_backend(%s, 10000)", [driver.info.backend_pid])
            driver.execute("SELECT 1")

    for block in (database.single(), database.begin()):
        with pytest.raises(StoreUnavailable):
            meet_it(block)
        assert database.scalar(text("SELECT 1")) == 1
