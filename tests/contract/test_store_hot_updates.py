"""Claims, renewals, outcomes and evidence are written without touching an index (HOT), and read by one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import Connection, text

from alphaloop.messages import Mode
from alphaloop.store import jobs, outcomes
from alphaloop.store.database import Database, driver_of
from alphaloop.store.job_counts import JobCounts
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import record_counts
from tests.fixtures.runs import claim_request, decode_run, vanilla_counts

pytestmark = pytest.mark.postgres

NUM_JOBS = 64
OWNER = "gpu-worker-1-12345-0a1b2c3d"
NAMES = [f"{number:036}" for number in range(NUM_JOBS)]


COUNTED = """
    SELECT pg_stat_get_xact_tuples_updated(t), pg_stat_get_xact_tuples_hot_updated(t)
    FROM (SELECT to_regclass(:name)::oid AS t) AS its
"""


def updates(connection: Connection, table: str, act: Callable[[], object]) -> tuple[int, int]:
    """How many rows of a table `act` updates, and how many of them without touching an index but a summary."""
    before = connection.execute(text(COUNTED), {"name": table}).one()
    act()
    after = connection.execute(text(COUNTED), {"name": table}).one()
    return after[0] - before[0], after[1] - before[1]


def test_renewals_and_outcomes_touch_no_index(database: Database) -> None:
    JobStore(database).claim([claim_request(one) for one in NAMES], owner=OWNER, lease_s=60, max_attempts=3)
    given = {"job_id": NAMES, "attempt": [1] * NUM_JOBS, "owner": OWNER, "lease_s": 60.0}
    with database.begin() as connection:
        renewed = updates(connection, "jobs", lambda: driver_of(connection).execute(jobs._RENEW, given))
    ended = {**given, "status": ["succeeded"] * NUM_JOBS, "result": ['{"text": "' + "x" * 800 + '"}'] * NUM_JOBS}
    ended["headers"] = [None] * NUM_JOBS
    with database.begin() as connection:
        recorded = updates(connection, "jobs", lambda: driver_of(connection).execute(outcomes._END_JOBS, ended))
    assert renewed == recorded == (NUM_JOBS, NUM_JOBS)


def test_evidence_of_a_key_is_changed_in_its_page(database: Database) -> None:
    counted = JobCounts("a", 1, decode_run(vanilla_counts(5), mode=Mode.VANILLA))
    with database.begin() as connection:
        record_counts(connection, [counted], timedelta(days=3))
    with database.begin() as connection:
        again = partial(record_counts, connection, [counted], timedelta(days=3))
        assert updates(connection, "acceptance_state", again) == (1, 1)


def test_no_index_hides_a_column_that_outcomes_change(database: Database) -> None:
    """But for summaries (BRIN), which leave an update HOT since PostgreSQL 16."""
    changed = ["status", "outcome", "owner", "lease_expires_at", "finished_at", "attempt", "num_crashes"]
    query = text(r"""
        SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attname = ANY(:changed)
        WHERE i.indrelid = 'jobs'::regclass AND m.amname <> 'brin'
            AND (a.attnum = ANY(i.indkey) OR pg_get_expr(i.indpred, i.indrelid) ~ format('\m%s\M', a.attname))
    """)
    assert database.rows(query, {"changed": changed}) == []
