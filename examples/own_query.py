"""Which tasks does speculation speed up? python own_query.py

The views are meant for people and programs, and are versioned: docs/reference/sql.md.
"""

from __future__ import annotations

import os

import psycopg

QUERY = """
SELECT task, drafter, min_num_draft_tokens, max_num_draft_tokens, mean_running,
       speedup, speedup_low, speedup_high, verdict
FROM task_speedup_now ORDER BY task
"""

with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    rows = connection.execute(QUERY).fetchall()
for task, drafter, min_k, max_k, running, speedup, low, high, verdict in rows:
    # There is no figure before eight control blocks: say so instead of guessing.
    figure = "not measured yet" if speedup is None else f"{speedup:.2f} [{low:.2f} {high:.2f}]"
    print(f"{task}: {drafter}, k {min_k} to {max_k}, {running:.1f} running: {figure}, {verdict}")
if not rows:
    print("no task has been measured yet")
