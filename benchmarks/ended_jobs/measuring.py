"""The operations whose time must not grow with the table, and how long each takes."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
from psycopg.errors import QueryCanceled

from alphaloop.errors import StoreError
from alphaloop.store import housekeeping
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import CHUNK_ROWS, RetentionStore
from alphaloop.store.jobs import ClaimRequest, JobStore
from alphaloop.store.outcomes import Outcome, OutcomeStore

GROUP: Final = 64
OWNER: Final = "benchmark-worker-1"
LIMIT_S: Final = 60
RESULT: Final = b'{"status":"succeeded","text":"' + b"one two three four " * 40 + b'"}'
#: Queries of docs/guides/operate.md, docs/reference/sql.md and the commands.
QUERIES: Final = {
    "why jobs failed in the last hour": """
        SELECT code, count(*) FROM failed_jobs
        WHERE status = 'failed' AND finished_at > now() - interval '1 hour' GROUP BY code ORDER BY count(*) DESC""",
    "failed jobs of the last day, 50 of them": """
        SELECT finished_at, task, job_id, status, code, message FROM failed_jobs
        WHERE finished_at >= now() - interval '1 day' LIMIT 50""",
    "jobs by status in the last hour": """
        SELECT task, status, count(*) FROM jobs WHERE created_at > now() - interval '1 hour' GROUP BY task, status""",
    "a job by its id": """
        SELECT status, attempt, owner, lease_expires_at, finished_at FROM jobs
        WHERE job_id = md5(%(recent)s::text)::uuid::text""",
    "progress of a batch": """
        SELECT status, count(*) FROM jobs WHERE batch_id = 'batch-' || %(recent)s::int / 1000 GROUP BY status""",
}


def measure(database: Database, connection: psycopg.Connection, num_jobs: int, repeats: int) -> dict[str, float | None]:
    """Median milliseconds by operation; None where it took longer than `LIMIT_S`."""
    return {what: _median_ms(act, repeats) for what, act in _operations(database, connection, _recent(num_jobs))}


def plans(connection: psycopg.Connection, num_jobs: int) -> dict[str, str]:
    """How each query, and a chunk of retention, is carried out now."""
    given: dict[str, Any] = {"since": datetime.min.replace(tzinfo=UTC), "before": _old(), "chunk": CHUNK_ROWS}
    chunk = housekeeping._JOBS.text
    for name in given:
        chunk = chunk.replace(f":{name}", f"%({name})s")
    given["recent"] = _recent(num_jobs)
    found = {}
    for what, query in {**QUERIES, "a chunk of retention": chunk}.items():
        rows = connection.execute(f"EXPLAIN (COSTS OFF) {query}", given)
        found[what] = "\n".join(line for (line,) in rows)
    return found


def _operations(
    database: Database, connection: psycopg.Connection, recent: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """In this order, because the first ones make what the later ones use; `recent`: number of a job that is not old."""
    jobs, outcomes, old = JobStore(database), OutcomeStore(database), RetentionStore(database)
    claimed: list[str] = []

    def claim(requests: list[ClaimRequest]) -> None:
        jobs.claim(requests, owner=OWNER, lease_s=60, max_attempts=3)

    def claim_new() -> None:
        names = [str(uuid.uuid4()) for _ in range(GROUP)]
        claim([_request(name) for name in names])
        claimed.extend(names)

    def claim_known() -> None:
        row = connection.execute(
            "SELECT job_id, payload_sha256 FROM jobs WHERE batch_id = 'batch-' || %s::int / 1000 LIMIT %s",
            (recent, GROUP),
        ).fetchall()
        claim([_request(name, sha) for name, sha in row])

    def renew() -> None:
        jobs.renew(dict.fromkeys(claimed[-GROUP:], 1), owner=OWNER, lease_s=60)

    def record() -> None:
        names, claimed[:] = claimed[:GROUP], claimed[GROUP:]
        ended = [Outcome(name, 1, "succeeded", RESULT, "results", {}) for name in names]
        if len(outcomes.record(ended, owner=OWNER)) != GROUP:
            raise StoreError("expected every claim to be held")

    def delete_chunk() -> None:
        calls = iter([False, True])
        old.drop_jobs(_old(), lambda: next(calls))

    yield f"claim {GROUP} new jobs", claim_new
    yield f"claim {GROUP} jobs that ended", claim_known
    yield f"renew {GROUP} claims", renew
    yield f"record {GROUP} outcomes", record
    for what, query in QUERIES.items():
        yield what, lambda query=query: connection.execute(query, {"recent": recent}).fetchall()  # type: ignore[misc]
    yield f"retention: {CHUNK_ROWS} jobs", delete_chunk
    yield "retention: nothing to delete", lambda: old.drop_jobs(_old() - timedelta(days=400), lambda: False)


def _median_ms(act: Callable[[], object], repeats: int) -> float | None:
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        try:
            act()
        except QueryCanceled:
            return None
        except StoreError as error:
            if "57014" not in error.message:
                raise
            return None
        times.append(1000 * (time.perf_counter() - began))
    # The first one also reads what nobody has read before.
    return statistics.median(times[1:] or times)


def _request(job_id: str, sha256: bytes = b"x" * 32) -> ClaimRequest:
    return ClaimRequest(job_id, sha256, "task-1", "", None, None, "traffic")


def _recent(num_jobs: int) -> int:
    """The number of a job that ended four days ago."""
    return num_jobs * 9 // 10


def _old() -> datetime:
    return datetime.now(UTC) - timedelta(days=30)
