"""The chain of migrations against a real PostgreSQL: complete, reversible, safe to run twice at once."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from alembic import command
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import ConfigError, SchemaMismatch, StoreUnavailable
from alphaloop.store import schema
from alphaloop.store.database import SUPPORTED_REVISIONS, Database
from tests.fixtures.runs import partition_days
from tests.fixtures.worker import until

pytestmark = pytest.mark.postgres

MIGRATION_LOCK = 0x616C706861  # as in migrations/env.py
ROOT = Path(__file__).resolve().parents[2]


def test_up_down_up_leaves_the_same_schema_and_down_leaves_nothing(empty_database_url: SecretStr) -> None:
    empty = _objects(empty_database_url)
    assert schema.current(empty_database_url) is None
    assert schema.pending(empty_database_url)
    schema.upgrade(empty_database_url)
    first = _objects(empty_database_url)
    assert schema.current(empty_database_url) == SUPPORTED_REVISIONS[-1]
    assert not schema.pending(empty_database_url)
    command.downgrade(schema.alembic_config(empty_database_url), "base")
    left = {name for _, name in _objects(empty_database_url) - empty}
    assert {name for name in left if "alembic_version" not in name} == set()
    schema.upgrade(empty_database_url)
    assert _objects(empty_database_url) == first > empty
    command.check(schema.alembic_config(empty_database_url))


def test_two_processes_may_migrate_at_once(empty_database_url: SecretStr) -> None:
    with Database(empty_database_url) as database:
        with database.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            migrate = [sys.executable, "-m", "alembic", "upgrade", "head"]
            environment = {**os.environ, "DATABASE_URL": empty_database_url.get_secret_value()}
            processes = [
                subprocess.Popen(migrate, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
                for _ in range(2)
            ]
            query = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            until(lambda: connection.execute(query).scalar_one() == 2, "both wait for the lock")
        errors = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
        assert database.check_revision() == SUPPORTED_REVISIONS[-1]


def test_the_first_week_has_partitions(database: Database) -> None:
    today = datetime.now(UTC).date()
    days = partition_days(database)
    assert {today + timedelta(days=n) for n in range(7)} <= set(days)
    assert len(days) == 9


def test_every_table_and_view_column_has_a_comment(database: Database) -> None:
    query = """
        SELECT c.relname, a.attname FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'public'
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition AND c.relname <> 'alembic_version'
          AND (col_description(c.oid, a.attnum) IS NULL OR obj_description(c.oid) IS NULL)
    """
    assert database.rows(text(query)) == []


def test_a_database_without_schema_is_refused_with_the_way_out(empty_database_url: SecretStr) -> None:
    with Database(empty_database_url) as database, pytest.raises(SchemaMismatch, match="found none") as refusal:
        database.check_revision()
    assert (refusal.value.hint or "").startswith("alphaloop migrate; or the search_path")


@pytest.mark.parametrize("revision", ["0002", "0010"])
def test_a_database_of_an_earlier_checkout_is_refused_as_it_is(empty_database_url: SecretStr, revision: str) -> None:
    """Nothing was released at these revisions, so no migration leads from them: 0011 comes after 0001."""
    schema.upgrade(empty_database_url)
    with Database(empty_database_url) as database:
        database.change(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
        database.change(text("DELETE FROM code_revisions"))
        database.change(text("INSERT INTO code_revisions VALUES (:revision)"), {"revision": revision})
        with pytest.raises(SchemaMismatch, match=f"expected schema revision 0015.*found {revision}") as start:
            database.check_revision()
    with pytest.raises(SchemaMismatch, match=f"up to 0015, found {revision}") as migrate:
        schema.upgrade(empty_database_url)
    assert start.value.hint == migrate.value.hint
    assert "create a new one" in (start.value.hint or "")
    assert schema.current(empty_database_url) == revision


def test_the_sql_can_be_printed_for_those_who_run_it_by_hand(empty_database_url: SecretStr) -> None:
    """alembic's offline mode needs no database; what it prints builds the same schema."""
    printed = subprocess.run(
        [sys.executable, "-m", "alembic", "-x", "url=postgresql://nobody@nowhere/none", "upgrade", "head", "--sql"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    with psycopg.connect(empty_database_url.get_secret_value(), autocommit=True) as connection:
        connection.execute(printed.stdout.encode())
    command.check(schema.alembic_config(empty_database_url))
    assert schema.current(empty_database_url) == SUPPORTED_REVISIONS[-1]


def test_migrating_nowhere_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no env"):
        schema.upgrade(SecretStr("postgresql://u:p@127.0.0.1:1/x"), migrations=tmp_path)
    with pytest.raises(StoreUnavailable, match="no connection"):
        schema.upgrade(SecretStr("postgresql://u:p@127.0.0.1:1/x"))


def _objects(url: SecretStr) -> set[tuple[str, str]]:
    """Everything in the schema `public`: (kind, name)."""
    query = """
        SELECT relkind::text, relname FROM pg_class WHERE relnamespace = 'public'::regnamespace
        UNION ALL SELECT prokind::text || '()', oid::regprocedure::text FROM pg_proc
            WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT contype::text || '?', conname FROM pg_constraint WHERE connamespace = 'public'::regnamespace
    """
    with Database(url) as database, database.begin() as connection:
        return {(kind, name) for kind, name in connection.execute(text(query))}
