"""Whether a contestant did what it was timed for. A run that did not counts for nothing and ends the benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg
from psycopg import sql


class NotDone(RuntimeError):
    """Results or rows are missing, or there are too many."""


def check_results(name: str, wanted: Collection[str], found: Sequence[str]) -> int:
    """Every job's result arrived; returns how many arrived more than once. Raises NotDone."""
    keys, wanted = set(found), set(wanted)
    if keys != wanted:
        raise NotDone(
            f"{name}: {len(wanted - keys)} of {len(wanted)} results are missing, {len(keys - wanted)} belong to no job"
        )
    return len(found) - len(keys)


def check_rows(name: str, database_url: str, table: str, wanted: Collection[str]) -> None:
    """Every job has exactly one row that says it succeeded. Raises NotDone."""
    query = sql.SQL("SELECT job_id FROM {} WHERE status = 'succeeded'").format(sql.Identifier(table))
    with psycopg.connect(database_url) as connection:
        rows = [row[0] for row in connection.execute(query)]
    missing = set(wanted) - set(rows)
    if missing or len(rows) != len(set(wanted)):
        raise NotDone(f"{name}: {len(rows)} rows for {len(set(wanted))} jobs, {len(missing)} jobs without one")


def check_outbox(name: str, database_url: str) -> None:
    """Nothing that was recorded waits to be published. Raises NotDone."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    if row is None or row[0] != 0:
        raise NotDone(f"{name}: {row and row[0]} results are still in the outbox")
