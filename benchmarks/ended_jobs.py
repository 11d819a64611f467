"""A table of ended jobs, filled by the server itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

import psycopg

#: The oldest jobs are this old; retention would have deleted a quarter of them.
SPAN: Final = timedelta(days=40)
CHUNK: Final = 250_000
#: Outcomes of 700 to 1,000 bytes, which stay in their page; one in fifty failed; a batch has 1,000 jobs.
_FILL: Final = """
    INSERT INTO jobs (job_id, payload_sha256, task, custom_id, batch_id, purpose, status, attempt,
        created_at, finished_at, outcome)
    SELECT md5(n::text)::uuid::text, decode(md5(n::text) || md5(n::text), 'hex'), 'task-' || n %% 20, 'c-' || n,
        'batch-' || n / 1000, 'traffic', CASE n %% 50 WHEN 0 THEN 'failed' ELSE 'succeeded' END, 1,
        at, at + interval '20 seconds',
        CASE n %% 50 WHEN 0
            THEN '{"status":"failed","error":{"code":"decode_failed","message":"a step failed","field":null}}'
            ELSE '{"status":"succeeded","text":"' || repeat(md5(n::text) || ' ', 20 + n %% 10) || '"}' END::json
    FROM generate_series(%(first)s::int, %(last)s::int) AS n,
        LATERAL (SELECT now() - %(span)s::interval * (1 - n / %(all)s::float8) AS at) AS moments
"""


def fill(connection: psycopg.Connection, num_jobs: int, tell: Callable[[int], None]) -> None:
    """Write `num_jobs` ended jobs, as dense as outcomes beside their claims come to lie; then vacuum and analyse.

    Rows of `jobs` that arrive with their outcomes would each get a page of their own; here they fill pages. The primary
    key is built after the rows, which takes half the time.
    """
    connection.execute("ALTER TABLE jobs DROP CONSTRAINT pk_jobs")
    connection.execute("ALTER TABLE jobs SET (fillfactor = 100, autovacuum_enabled = off)")
    for first in range(1, num_jobs + 1, CHUNK):
        last = min(first + CHUNK - 1, num_jobs)
        connection.execute(_FILL, {"first": first, "last": last, "span": SPAN, "all": num_jobs})
        tell(last)
    connection.execute("SET maintenance_work_mem = '1GB'")
    connection.execute("ALTER TABLE jobs ADD CONSTRAINT pk_jobs PRIMARY KEY (job_id)")
    connection.execute("ALTER TABLE jobs SET (fillfactor = 15)")
    connection.execute("ALTER TABLE jobs RESET (autovacuum_enabled)")
    connection.execute("VACUUM ANALYZE jobs")
