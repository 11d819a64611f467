"""What lies around the runs: their jobs, the choices, slices, evidence, drift, schedules and reports."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import psycopg

from alphaloop.acceptance import EvidenceKey
from alphaloop.costs import CostPoint
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence
from alphaloop.store.acceptance_state import pack
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from benchmarks.ended_jobs.filling import filled_densely
from benchmarks.stored_runs.keys import Key, all_keys
from benchmarks.stored_runs.ledger import DEVICE, NUM_DAYS, Filled

#: Jobs of so many days have rows; `benchmarks.ended_jobs` is about many more.
JOBS_SPAN: Final = timedelta(days=7)
SLICES_SPAN: Final = timedelta(days=3)
_JOBS: Final = """
    INSERT INTO jobs (job_id, payload_sha256, task, segment, batch_id, purpose, status, attempt, num_failures,
        created_at, finished_at, outcome)
    SELECT job_id, sha256(job_id::bytea), task, segment,
        CASE WHEN decoded_at > %(end)s - interval '3 hours' AND segment = 'batch' THEN 'night'
            ELSE 'batch-' || ledger_id / 1000 END, purpose, 'succeeded', 1, (ledger_id %% 100 = 0)::int,
        decoded_at - interval '20 s', decoded_at + interval '20 ms',
        json_build_object('status', 'succeeded', 'text', repeat(md5(job_id) || ' ', 8),
            'usage', json_build_object('completion_tokens', num_tokens))
    FROM decode_runs WHERE decoded_at >= %(since)s
"""
#: Of every fifty jobs one failed. Two hundred jobs run.
_FAILED: Final = """
    INSERT INTO jobs (job_id, payload_sha256, task, purpose, status, attempt, created_at, finished_at, outcome)
    SELECT 'failed-' || job_id, payload_sha256, task, purpose, 'failed', 3, created_at, finished_at,
        '{"status":"failed","error":{"code":"decode_failed","message":"a step failed","field":null}}'
    FROM jobs WHERE hashtext(job_id) %% 50 = 0
"""
_RUNNING: Final = """
    INSERT INTO jobs (job_id, payload_sha256, task, purpose, status, attempt, owner, lease_expires_at, created_at,
        num_failures)
    SELECT 'running-' || n, sha256(n::text::bytea), 'code', 'traffic', 'running', 1,
        CASE WHEN n %% 20 > 0 THEN 'worker-' || n %% 4 END, now() + interval '1 hour', now() - n * interval '1 s',
        (n %% 20 = 0)::int
    FROM generate_series(1, 200) AS n
"""
_CHOICES: Final = """
    INSERT INTO decisions (decided_at, task, target_revision, device, sampling_bucket, batch, from_mode, from_drafter,
        from_num_draft_tokens, to_mode, to_drafter, to_num_draft_tokens, reason, explanation, owner, speedup,
        speedup_low, speedup_high, rival_num_draft_tokens, rival_speedup, jobs, trials, accepts)
    SELECT %(end)s - n * interval '15 minutes', task, 'target-2', %(device)s, sampling, 8, 'vanilla', NULL, 0,
        'speculative', 'lookup', 2 + n %% 3, 'faster', '1.21x vanilla expected (1.05 to 1.40)', 'worker-1', 1.21, 1.05,
        1.40, 0, 1.0, 50, '{90,60,40,30}', '{60,40,30,20}'
    FROM generate_series(0, 5759) AS n, (SELECT DISTINCT task FROM bench.keys) AS t,
        unnest(ARRAY['greedy', 't<=1.0']) AS sampling
    WHERE hashtext(task || n || sampling) %% 4 = 0 ORDER BY 1
"""
#: Blocks of a control slice of 16 rounds between windows of treatment, and the rounds since the block before.
_SLICES: Final = """
    INSERT INTO switchback_slices (started_at, block_id, phase, task, sampling_bucket, target_revision, engine, host,
        device, drafter, draft_revision, num_draft_tokens, num_rounds, num_sequence_rounds, num_tokens, num_proposed,
        sequence_s, sum_running, sum_context, num_prompt_rounds, num_prompt_sequence_rounds, num_prompt_tokens,
        prompt_sequence_s, expected_sequence_s, expected_vanilla_s, expected_low_s, expected_high_s,
        uncorrected_vanilla_s, model_sd_s, owner)
    SELECT %(end)s - %(span)s::interval * (1 - n / %(blocks)s::float8) + place * interval '200 ms', 'block-' || n,
        phase, task, sampling_bucket, 'target-2', 'transformers-5.23.0/bfloat16', 'host-' || n %% 2, %(device)s,
        drafter, drafter || '-1', k, rounds, 4 * rounds,
        CASE phase WHEN 'control' THEN 4 * rounds ELSE 10 * rounds END,
        CASE phase WHEN 'control' THEN 0 ELSE 16 * rounds END,
        rounds * CASE phase WHEN 'control' THEN .08 ELSE .12 END * (1 + .1 * sin(n * 7.0 + place)), 8 * rounds,
        256.0 * rounds, 0, 0, 0, 0, .12 * rounds, .16 * rounds, .13 * rounds, .19 * rounds, .16 * rounds, .02 * rounds,
        'worker-' || n %% 2
    FROM generate_series(1, %(blocks)s) AS n
        JOIN LATERAL (SELECT * FROM bench.keys WHERE drafter <> '' AND key = width_bucket(
            (hashint8extended(n, 11) & 1048575)::float8 / 1048576, %(uppers)s::float8[])) AS key ON true,
        unnest(ARRAY['between', 'before', 'control', 'after'], ARRAY[160, 16, 16, 16]) WITH ORDINALITY
            AS phases(phase, rounds, place)
"""
#: A pair for every eight blocks of the last week.
_PAIRS: Final = """
    INSERT INTO expectation_pairs (task, sampling_bucket, target_revision, engine, host, device, drafter,
        draft_revision,
        expected, expected_low, expected_high, uncorrected, model_sd, speedup, speedup_low, speedup_high, num_blocks,
        min_num_draft_tokens, max_num_draft_tokens, mean_running, covers_from, covers_to, computed_at)
    SELECT task, sampling_bucket, 'target-2', 'transformers-5.23.0/bfloat16', 'host-' || n %% 2, %(device)s, drafter,
        drafter || '-1', 1.3, 1.1, 1.5, 1.3, .1, 1.2 + .1 * sin(n), 1.1, 1.4, 8, 2, k, 8, at, at + interval '1 minute',
        at + interval '1 minute'
    FROM generate_series(1, %(pairs)s) AS n
        JOIN LATERAL (SELECT * FROM bench.keys WHERE drafter <> '' AND key = width_bucket(
            (hashint8extended(n, 13) & 1048575)::float8 / 1048576, %(uppers)s::float8[])) AS key ON true,
        LATERAL (SELECT now() - interval '7 days' * (n / %(pairs)s::float8) AS at) AS moments
"""
_EVENTS: Final = """
    WITH made AS (
        INSERT INTO drift_events (task, drafter, draft_revision, target_revision, cause, verdict, action, evidence,
            opened_at, raised_at, closed_at, closed_because)
        SELECT task, drafter, drafter || '-1', 'target-2', 'traffic_changed', 'alpha fell', 'nothing',
            '{"flagged_by": "traffic", "probes": null, "traffic": null}', at, at,
            CASE WHEN n > 2 THEN at + interval '1 day' END, CASE WHEN n > 2 THEN 'alpha is back' END
        FROM (SELECT DISTINCT task, drafter FROM bench.keys WHERE drafter = 'lookup') AS k, generate_series(1, 29) AS n,
            LATERAL (SELECT %(end)s - n * interval '2 days' AS at) AS moments
        WHERE n <> 2 RETURNING id, cause, opened_at
    )
    INSERT INTO drift_event_states (event_id, at, state, cause, sentence, actor, evidence)
    SELECT id, opened_at + place * interval '6 hours', state, cause, 'alpha fell', 'scheduler', '{}'
    FROM made, unnest(ARRAY['opened', 'explained', 'confirmed', 'closed']) WITH ORDINALITY AS s(state, place)
"""
#: The drift test has read all but the last hour.
_POSITIONS: Final = """
    INSERT INTO drift_positions SELECT DISTINCT task, now() - interval '1 hour', 0 FROM bench.keys
"""
_RUNS_DUE: Final = """
    INSERT INTO schedule_runs (schedule_id, scheduled_for, owner, started_at, finished_at, outcome)
    SELECT 'measure', at, 'scheduler-1', at, at + interval '3 s', '{"num_jobs": 1}'
    FROM generate_series(now() - interval '60 days', now() - interval '1 hour', interval '1 hour') AS at
"""
_OUTBOX: Final = """
    INSERT INTO outbox (topic, job_ids, owner) SELECT 'results', ARRAY['running-' || n], 'worker-1'
    FROM generate_series(1, 20) AS n
"""


def fill_surroundings(connection: psycopg.Connection, database: Database, filled: Filled) -> None:
    """Everything that the documents' queries and a run of the scheduler read, but the ledger and the probes."""
    # A block for about every sixteen jobs: control takes two hundredths of the time.
    blocks_a_day = filled.num_runs // NUM_DAYS // 16
    given = {
        "end": filled.end,
        "since": filled.end - JOBS_SPAN,
        "span": SLICES_SPAN,
        "device": DEVICE,
        "blocks": max(200, blocks_a_day * SLICES_SPAN.days),
        "pairs": max(200, blocks_a_day * 7 // 8),
        "uppers": [key.upper for key in all_keys()],
    }
    with filled_densely(connection):
        connection.execute(_JOBS, given)
        connection.execute(_FAILED, given)
        connection.execute(_RUNNING, given)
    for statement in (_CHOICES, _SLICES, _PAIRS, _EVENTS, _POSITIONS, _RUNS_DUE, _OUTBOX):
        connection.execute(statement, given)
    _fill_state(connection, filled)
    costs = [
        CostPoint(None, batch, width, 20.0 + batch + width, 5)
        for batch in (1, 2, 4, 8, 16, 32)
        for width in range(1, 10)
    ]
    CostStore(database).save("host-1", DEVICE, "transformers-5.23.0/bfloat16", "target-2", {}, costs)


def _fill_state(connection: psycopg.Connection, filled: Filled) -> None:
    """The evidence of every key of a decision (k is none of its parts), as of the end."""
    keys: dict[EvidenceKey, Key] = {}
    for key in all_keys():
        its = EvidenceKey(
            key.task, "target-2", "transformers-5.23.0/bfloat16", key.sampling_bucket, key.prompt_bucket, key.segment,
            key.drafter, f"{key.drafter}-1" if key.drafter else "",
        )  # fmt: skip
        keys.setdefault(its, key)
    with connection.cursor() as cursor:
        for its, key in keys.items():
            trials = tuple(40.0 * key.alpha**i for i in range(key.num_draft_tokens))
            job = EvidenceSums(
                filled.end, jobs=1.0, jobs_w2=1.0, rounds=50.0, offered=40.0, tokens=90.0, output_tokens=91.0,
                output_tokens_sq=91.0**2, prompt_tokens=200.0, texts=1.0, ends=1.0,
                proposed=(40.0,) * len(trials), chances=trials, trials=trials,
                accepts=tuple(t * key.alpha for t in trials),
                trials_w2=tuple(t**2 for t in trials), accepts_w2=tuple((t * key.alpha) ** 2 for t in trials),
                accepts_trials_w2=tuple(t**2 * key.alpha for t in trials), chances_w2=tuple(t**2 for t in trials),
                accepts_chances_w2=tuple(t**2 * key.alpha for t in trials),
            )  # fmt: skip
            packed = pack(KeyEvidence.empty(filled.end).with_job(job, timedelta(days=3)))
            columns = its.columns
            cursor.execute(
                f"INSERT INTO acceptance_state ({', '.join(columns)}, as_of, num_jobs, evidence, last_ledger_id, "
                f"changed_in) VALUES ({', '.join(['%s'] * len(columns))}, %s, 5000, %s, 1, 1)".encode(),
                (*columns.values(), filled.end, packed),
            )
