"""Claims, renewals and outcomes cost the same whatever the planner believes: the size of the table never shows."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from pydantic import SecretStr

from alphaloop.store import housekeeping, jobs, outcomes
from alphaloop.store.database import Database

pytestmark = pytest.mark.postgres

NUM_ROWS = 20_000
NAMES = [f"new-{number}" for number in range(64)]
GIVEN = {
    "owner": "w",
    "lease_s": 60.0,
    "max_attempts": 3,
    "alone": False,
    "job_id": NAMES,
    "payload_sha256": [b"x"] * 64,
    "task": ["code"] * 64,
    "segment": [""] * 64,
    "custom_id": [None] * 64,
    "batch_id": [None] * 64,
    "purpose": ["traffic"] * 64,
    "attempt": [1] * 64,
    "status": ["succeeded"] * 64,
    "result": ["{}"] * 64,
    "headers": [None] * 64,
}
STATEMENTS = {"claim": jobs._CLAIM, "renew": jobs._RENEW, "outcome": outcomes._END_JOBS}
FILL = """
    INSERT INTO jobs (job_id, payload_sha256, task, purpose, status, attempt, finished_at, outcome)
    SELECT 'old-' || n, 'x', 'code', 'traffic', 'succeeded', 1, now(), '{}' FROM generate_series(1, %s) AS n
"""
#: What the planner may believe about a table that holds `NUM_ROWS`: relpages, reltuples.
BELIEFS = {"never analysed": (0, -1), "empty": (1, 0), "a few wide rows": (1, 3), "huge": (10_000_000, 1e10)}


@pytest.fixture
def connection(database_url: SecretStr, database: Database) -> Iterator[psycopg.Connection]:
    """With plans that are made once and kept, as a worker's are after a while."""
    with psycopg.connect(database_url.get_secret_value(), autocommit=True, prepare_threshold=0) as connection:
        connection.execute("ALTER TABLE jobs SET (autovacuum_enabled = off)")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        yield connection


def seq_scans(connection: psycopg.Connection) -> int:
    """How often this connection has read all of `jobs`, since its counts were last collected."""
    row = connection.execute("SELECT pg_stat_get_xact_numscans('jobs'::regclass)").fetchone()
    return int(row[0])


def test_a_plan_that_was_made_while_the_table_was_empty_stays_good(connection: psycopg.Connection) -> None:
    for statement in STATEMENTS.values():
        connection.execute(statement, GIVEN)
    connection.execute("DELETE FROM jobs")
    connection.execute(FILL, (NUM_ROWS,))
    for name, statement in STATEMENTS.items():
        with connection.transaction():
            before = seq_scans(connection)
            connection.execute(statement, GIVEN)
            assert seq_scans(connection) == before, name
    # The count is one of a statement that must read everything; else the test could not fail.
    with connection.transaction():
        before = seq_scans(connection)
        connection.execute("SELECT count(outcome) FROM jobs")
        assert seq_scans(connection) == before + 1


def test_retention_reads_what_it_deletes_and_no_more(connection: psycopg.Connection) -> None:
    connection.execute(FILL, (NUM_ROWS,))
    connection.execute(
        "UPDATE jobs SET created_at = now() - interval '1 year', finished_at = now() - interval '1 year'"
    )
    connection.execute("VACUUM ANALYZE jobs")
    chunk = (
        housekeeping._JOBS.text.replace(":since", "'-infinity'").replace(":before", "now()").replace(":chunk", "1000")
    )
    plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN (COSTS OFF) {chunk}"))  # type: ignore[arg-type]
    assert "Index Scan using ix_jobs_created_at" in plan
    assert "Sort" not in plan
    assert "Seq Scan on jobs" not in plan


def test_the_plan_does_not_depend_on_statistics(connection: psycopg.Connection) -> None:
    connection.execute(FILL, (NUM_ROWS,))
    for belief, numbers in BELIEFS.items():
        if belief != "never analysed":
            connection.execute("ANALYZE jobs")
        connection.execute("UPDATE pg_class SET relpages = %s, reltuples = %s WHERE oid = 'jobs'::regclass", numbers)
        for statement in STATEMENTS.values():
            told = connection.execute(sql.SQL("EXPLAIN (COSTS OFF) {}").format(sql.SQL(statement)), GIVEN)  # type: ignore[arg-type]
            plan = "\n".join(line for (line,) in told)
            assert "Conflict Arbiter Indexes: pk_jobs" in plan, belief
            assert "on jobs" in plan, belief
            assert "Scan on jobs" not in plan.replace("Scan on pk_jobs", ""), belief
