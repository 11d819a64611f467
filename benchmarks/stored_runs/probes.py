"""Probes and controls of every day, with their texts, and the probe sets they come from."""

from __future__ import annotations

from typing import Final

import psycopg

from alphaloop.probes import new_probe_set
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.probes import ProbeSetStore
from benchmarks.stored_runs.keys import DRAFTERS, TASKS
from benchmarks.stored_runs.ledger import Filled

NUM_PROMPTS: Final = 4
_K: Final = 3
_SENT: Final = """
    INSERT INTO probe_runs (job_id, schedule_id, scheduled_for, task, probe_set, position, prompt_id, purpose, drafter,
        num_draft_tokens, payload_sha256, sent_at, compared_at)
    SELECT job_id, 'measure', decoded_at - interval '1 minute', r.task, s.version,
        right(job_id, 1)::int, p.prompt_id, purpose, nullif(drafter, ''),
        nullif(r.num_draft_tokens, 0), sha256(job_id::bytea), decoded_at - interval '1 minute',
        CASE purpose WHEN 'probe' THEN decoded_at + interval '1 hour' END
    FROM decode_runs AS r JOIN probe_sets AS s ON s.task = r.task AND s.is_active
        JOIN probe_prompts AS p ON p.task = s.task AND p.version = s.version AND p.position = right(job_id, 1)::int
    WHERE purpose IN ('probe', 'control')
"""
_TEXTS: Final = """
    INSERT INTO probe_texts (job_id, decoded_at, token_ids, finish_reason, max_tokens, second_ids, gaps, near_tie)
    SELECT job_id, decoded_at, ARRAY(SELECT generate_series(1, num_tokens)), 'length', num_tokens, '{}', '{}', .1
    FROM decode_runs WHERE purpose IN ('probe', 'control')
"""


def fill_probes(connection: psycopg.Connection, database: Database, filled: Filled) -> None:
    """Register drafts and sets; then what was sent, from the decoded probes of the ledger."""
    drafts, sets = DraftRegistry(database), ProbeSetStore(database)
    for drafter in DRAFTERS:
        for target in ("target-1", "target-2"):
            drafts.register(drafter, f"{drafter}-1", target)
    for task in TASKS:
        bodies = [{"prompt": f"Prompt {number} of {task}"} for number in range(NUM_PROMPTS)]
        sets.register(new_probe_set(task, bodies, num_draft_tokens=_K, max_tokens=48), filled.end)
    connection.execute(_SENT)
    connection.execute(_TEXTS)
