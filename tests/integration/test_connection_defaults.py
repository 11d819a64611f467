"""Defaults that others have given to connections: of the database, the role, and the environment (PG* variables)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
import pytest
from psycopg import sql
from pydantic import SecretStr
from sqlalchemy import make_url, text

from alphaloop.errors import StoreError
from alphaloop.settings import Settings
from alphaloop.settings.processes import SessionLimits
from alphaloop.store.database import Database, DatabaseClock, driver_of
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.drift import Sender, scheduler_of
from tests.fixtures.worker import Client, running_worker, until
from tests.integration.test_worker_flow import assert_counts_add_up
from tests.integration.test_worker_refusals import job

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

#: Every setting of PostgreSQL 15 to 18 that a user may set and that changes texts, their meaning, or what a
#: statement sees: with odd values.
ODD: Final = {
    "DateStyle": ("SQL, DMY", "German", "Postgres, YMD"),
    "IntervalStyle": ("sql_standard", "iso_8601", "postgres_verbose"),
    "client_encoding": ("LATIN1", "SQL_ASCII", "EUC_JIS_2004"),
    "TimeZone": ("Asia/Kathmandu", "<+0330>-03:30"),
    "timezone_abbreviations": ("Australia", "India"),
    "bytea_output": ("escape",),
    "extra_float_digits": ("-15", "3"),
    "standard_conforming_strings": ("off",),
    "escape_string_warning": ("off",),
    "backslash_quote": ("off",),
    "array_nulls": ("off",),
    "transform_null_equals": ("on",),
    "quote_all_identifiers": ("on",),
    "xmlbinary": ("hex",),
    "xmloption": ("document",),
    "lc_monetary": ("C", "POSIX"),
    "lc_numeric": ("C", "POSIX"),
    "lc_time": ("C", "POSIX"),
    "default_text_search_config": ("pg_catalog.german",),
    "default_transaction_isolation": ("serializable", "repeatable read"),
    "default_transaction_deferrable": ("on",),
    "row_security": ("off",),
    "statement_timeout": ("10s",),
    "lock_timeout": ("10s",),
    "idle_in_transaction_session_timeout": ("10s",),
    "idle_session_timeout": ("10s",),
    "exit_on_error": ("on",),
    "client_min_messages": ("error", "debug5"),
    "plan_cache_mode": ("force_generic_plan",),
    "synchronous_commit": ("off",),
    "search_path": ('"$user", public, pg_catalog',),
}
#: What libpq itself reads; these win over the database's and the role's defaults, and over `options` of a URL.
VARIABLES: Final = {"DateStyle": "PGDATESTYLE", "TimeZone": "PGTZ", "client_encoding": "PGCLIENTENCODING"}

MOMENT: Final = datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
SPAN: Final = timedelta(days=3, hours=4, seconds=5, microseconds=6)
NUMBER: Final = 0.1 + 0.2
STRANGE: Final = "žluťoučký 猫 \\x41 '\\' \\\\ \N{PILE OF POO}"


def is_reachable(database: Database) -> bool:
    """Whether a session answers."""
    try:
        return bool(database.scalar(text("SELECT 1")))
    except StoreError:
        return False


@contextmanager
def defaults(server: str, what: str, values: dict[str, str]) -> Iterator[None]:
    """ALTER DATABASE name, or ALTER ROLE name, SET these; undone at the end."""
    with psycopg.connect(server, autocommit=True) as connection:
        for name, value in values.items():
            value_of = sql.SQL(value) if name == "search_path" else sql.Literal(value)
            connection.execute(sql.SQL(f"ALTER {what} SET {name} TO {{}}").format(value_of))  # type: ignore[arg-type]
        try:
            yield
        finally:
            connection.execute(f"ALTER {what} RESET ALL".encode())


Way = Callable[[str, SecretStr, dict[str, str], pytest.MonkeyPatch], AbstractContextManager[None]]


def in_database(server: str, url: SecretStr, values: dict[str, str], _: object) -> AbstractContextManager[None]:
    return defaults(server, f'DATABASE "{make_url(url.get_secret_value()).database}"', values)


def in_role(server: str, url: SecretStr, values: dict[str, str], _: object) -> AbstractContextManager[None]:
    return defaults(server, f'ROLE "{make_url(url.get_secret_value()).username}"', values)


@contextmanager
def in_environment(
    server: str, url: SecretStr, values: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """As PG* variables: those that libpq has of their own, and the others in PGOPTIONS."""
    with monkeypatch.context() as patched:
        for name, variable in VARIABLES.items():
            if name in values:
                patched.setenv(variable, values[name])
        others = (f"-c {name}={value}".replace(" ", "\\ ").replace("-c\\ ", "-c ") for name, value in values.items())
        patched.setenv("PGOPTIONS", " ".join(others))
        yield


WAYS: Final[tuple[Way, ...]] = (in_database, in_role, in_environment)


#: What goes in must come out: a value of each type that has a text, and what a cast to text must make of some.
VALUES: Final = {
    "timestamptz": MOMENT,
    "date": MOMENT.date(),
    "interval": SPAN,
    "float8": NUMBER,
    "text": STRANGE,
    "bytea": b"\x00\\\xff",
    "text[]": ["a", None],
}
TEXTS: Final = {
    "timestamptz": "2026-02-03 04:05:06.789012+00",
    "interval": "3 days 04:00:05.000006",
    "float8": "0.30000000000000004",
    "bytea": "\\x005cff",
}
SHOWN: Final = {
    "transaction_isolation": "read committed",
    "statement_timeout": "1min",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "20s",
    "idle_session_timeout": "0",
    "exit_on_error": "off",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
}


def round_trip(database: Database) -> None:
    """What a store relies on, by SQLAlchemy and by the driver."""
    names = {kind: f"v{number}" for number, kind in enumerate(VALUES)}
    given = {names[kind]: value for kind, value in VALUES.items()}
    with database.begin() as connection:
        query = ", ".join(f"CAST(:{name} AS {kind})" for kind, name in names.items())
        assert tuple(connection.execute(text(f"SELECT {query}"), given).one()) == tuple(VALUES.values())
        driver = driver_of(connection)
        query = ", ".join(f"%({name})s::{kind}" for kind, name in names.items())
        assert driver.execute(f"SELECT {query}".encode(), given).fetchone() == tuple(VALUES.values())
        query = ", ".join(f"%({names[kind]})s::{kind}::text" for kind in TEXTS)
        assert driver.execute(f"SELECT {query}".encode(), given).fetchone() == tuple(TEXTS.values())
        shown = {name: connection.execute(text(f"SHOW {name}")).scalar_one() for name in SHOWN}
        assert shown == SHOWN


def odd_values() -> list[tuple[str, str]]:
    """Each setting with each of its odd values."""
    return [(name, value) for name, values in ODD.items() for value in values]


@pytest.mark.parametrize("way", WAYS)
def test_no_default_of_others_changes_what_a_store_reads_and_writes(
    postgres_server: str, database_url: SecretStr, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    for name, value in odd_values():
        with (
            way(postgres_server, database_url, {name: value}, monkeypatch),
            Database(database_url, pool_size=1, limits=SessionLimits()) as database,
        ):
            try:
                round_trip(database)
            except Exception as error:
                raise AssertionError(f"{name} = {value}") from error


def test_behind_a_pooler_neither(
    postgres_server: str,
    database_url: SecretStr,
    pooler_url: SecretStr,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = SessionLimits(through_pooler=True)
    for name, value in odd_values():
        with in_database(postgres_server, database_url, {name: value}, monkeypatch):
            with psycopg.connect(postgres_server, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    (make_url(database_url.get_secret_value()).database,),
                )
            with Database(pooler_url, pool_size=1, limits=limits) as database:
                until(lambda: is_reachable(database), "the pooler has new sessions")
                try:
                    round_trip(database)
                except Exception as error:
                    raise AssertionError(f"{name} = {value}") from error


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_a_scheduler_and_commands_under_all_of_them_together(
    worker_settings: Settings,
    stack_cli: Cli,
    postgres_server: str,
    database_url: SecretStr,
    monkeypatch: pytest.MonkeyPatch,
    way: Way,
) -> None:
    everything = {name: values[0] for name, values in ODD.items()}
    client, names = Client(worker_settings), [f"job-{number}" for number in range(20)]
    with way(postgres_server, database_url, everything, monkeypatch):
        assert stack_cli("migrate", "--json").code == 0
        with running_worker(worker_settings, FakeEngine(num_slots=4)):
            client.send("code", [job(name, custom_id=STRANGE) for name in names])
            results = client.results(len(names))
            assert sorted(result.job_id for result in results) == sorted(names)
            assert {result.custom_id for result in results} == {STRANGE}
        with Database(database_url) as database:
            assert scheduler_of(database, worker_settings, Sender()).run_once(DatabaseClock(database).now())
            assert_counts_add_up(database, num_jobs=len(names))
        for command in (("status", "--json"), ("job", "job-0", "--json"), ("report",), ("explain", "code")):
            ran = stack_cli(*command)
            assert ran.code == 0, ran.err
