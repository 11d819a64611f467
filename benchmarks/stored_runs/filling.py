"""A database with runs of 60 days, made by the server itself: their keys, the ledger, probes, and what lies around.

One day is drawn, by hashes of its places, so the same call gives the same rows. The other days repeat it under their
own ids, moments and revisions: the queries' time depends on how many rows there are, not on how the days differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, Final

import psycopg

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.costs import CostPoint
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence
from alphaloop.probes import new_probe_set
from alphaloop.store.acceptance_state import pack
from alphaloop.store.costs import CostStore, CostSubject
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.probes import ProbeSetStore
from benchmarks.ended_jobs import filled_densely

#: The documents' queries ask for `code`.
TASKS: Final = (
    "code", "chat", "sql", "summarization", "translation", "extraction", "rag", "math", "legal", "support",
    "classification", "rewriting", "planning", "tests", "review", "search", "titles", "mail", "reports", "tools",
)  # fmt: skip
#: Each with its sampling settings and its prompt lengths.
SEGMENTS: Final = (
    ("", "greedy", "<=256"),
    ("pro", "t<=1.0", "<=1024"),
    ("free", "t<=1.0", "<=256"),
    ("batch", "greedy", "<=4096"),
    ("internal", "greedy", "<=1024"),
)
#: Drafter, k, and α of its first position in the first task; vanilla first.
WAYS: Final = (
    ("", 0, 0.0),
    ("lookup", 4, 0.45), ("lookup", 8, 0.44), ("lookup", 2, 0.47),
    ("small", 3, 0.70), ("small", 5, 0.69), ("small", 1, 0.72),
    ("eagle", 4, 0.80), ("eagle", 6, 0.79), ("eagle", 2, 0.81),
)  # fmt: skip
DRAFTERS: Final = ("lookup", "small", "eagle")
#: Where a vanilla job also counted what look-up would have drafted: this way's counts.
SHADOW_WAY: Final = 1
#: Different counts that jobs of one key have; a power of two.
NUM_VARIANTS: Final = 16
MOST_POSITIONS: Final = max(k for _, k, _ in WAYS)


@dataclass(frozen=True, slots=True)
class Key:
    """One row of bench.keys; `upper` is where its share of the jobs ends, in (0, 1]."""

    key: int
    task: str
    segment: str
    sampling_bucket: str
    prompt_bucket: str
    drafter: str
    num_draft_tokens: int
    alpha: float
    upper: float

    @property
    def mode(self) -> str:
        """vanilla or speculative."""
        return "speculative" if self.drafter else "vanilla"


def all_keys() -> list[Key]:
    """Every task in every segment in every way. Shares fall with the rank of each of the three (Zipf)."""
    places = [(t, s, w) for t in range(len(TASKS)) for s in range(len(SEGMENTS)) for w in range(len(WAYS))]
    uppers = list(accumulate(1 / ((1 + t) * (1 + s) * (1 + w)) for t, s, w in places))
    found = []
    for number, (t, s, w) in enumerate(places):
        segment, sampling, prompt = SEGMENTS[s]
        drafter, k, alpha = WAYS[w]
        upper = uppers[number] / uppers[-1]
        found.append(Key(number, TASKS[t], segment, sampling, prompt, drafter, k, alpha * (1 - t / 100), upper))
    return found


def variants(key: Key) -> Iterator[AcceptanceCounts]:
    """The counts of jobs of a key: longer and shorter ones, of higher and of lower acceptance."""
    for variant in range(NUM_VARIANTS):
        rounds, alpha = 12 + 5 * variant, key.alpha + 0.02 * (variant % 5 - 2)
        # Look-up offers nothing in a third of its rounds. The prefill proposes nothing either.
        drafted = (rounds - 1) * (2 if key.drafter == "lookup" else 3) // 3 if key.drafter else 0
        left = [math.floor(drafted * alpha**i) for i in range(key.num_draft_tokens + 1)]
        yield AcceptanceCounts(
            rounds=rounds,
            num_empty_rounds=rounds - drafted,
            proposed=(drafted,) * key.num_draft_tokens,
            trials=tuple(left[:-1]),
            accepts=tuple(left[1:]),
        )


NUM_DAYS: Final = 60
#: Runs reach so far ahead of the clock, so that the last day is still whole when it is asked for.
AHEAD: Final = timedelta(hours=2)
#: By the day on which they began: the target changed 30 days ago, the engine 10 days ago.
_TARGETS: Final = (("target-1", 0), ("target-2", 30))
_ENGINES: Final = (("transformers-5.22.0/bfloat16", 0), ("transformers-5.23.0/bfloat16", 50))
DEVICE: Final = "cuda-h100"
_BY_POSITION: Final = ("proposed", "trials", "accepts")
_NUMBERS: Final = ("rounds", "num_empty_rounds", "num_tokens")
_PRODUCTS: Final = {
    "trials_sq": "c.trials, c.trials",
    "accepts_sq": "c.accepts, c.accepts",
    "accepts_trials": "c.accepts, c.trials",
}

_TABLES: Final = """
    CREATE SCHEMA bench;
    CREATE UNLOGGED TABLE bench.keys (
        key int PRIMARY KEY, task text, segment text, sampling_bucket text, prompt_bucket text, drafter text, k int,
        mode text, upper float8
    );
    CREATE UNLOGGED TABLE bench.counts (
        key int, variant int, rounds bigint, num_empty_rounds bigint, num_tokens bigint,
        proposed bigint[], trials bigint[], accepts bigint[], PRIMARY KEY (key, variant)
    );
    CREATE FUNCTION bench.products(a bigint[], b bigint[]) RETURNS bigint[] LANGUAGE sql IMMUTABLE
        RETURN ARRAY(SELECT x * y FROM unnest(a, b) WITH ORDINALITY AS p(x, y, i) ORDER BY i);
"""
#: A place's hash: 47 bits choose the key, four more the variant. Every eighth vanilla job scores a shadow. Behind the
#: traffic come the day's probes and controls, at its sixth hour.
_DAY: Final = f"""
    CREATE UNLOGGED TABLE bench.picked AS
    SELECT place, (place - .5)::float8 / %(a_day)s * interval '1 day' AS after, key, variant, 'traffic' AS purpose,
        place %% 8 = 0 AND key %% 10 = 0 AS has_shadow
    FROM generate_series(1, %(a_day)s) AS place, LATERAL (SELECT hashint8extended(place, 7) AS hash) AS h,
        LATERAL (SELECT width_bucket((hash & 140737488355327)::float8 / 140737488355328, %(uppers)s::float8[]) AS key,
            ((hash >> 48) & {NUM_VARIANTS - 1})::int AS variant) AS picked
    UNION ALL
    SELECT %(a_day)s + row_number() OVER (ORDER BY key, prompt), interval '6 hours', key, prompt,
        CASE drafter WHEN '' THEN 'control' ELSE 'probe' END, false
    FROM (SELECT drafter, min(key) AS key FROM bench.keys WHERE sampling_bucket = 'greedy' GROUP BY task, drafter) AS k,
        generate_series(0, %(prompts)s - 1) AS prompt;
    CREATE UNLOGGED TABLE bench.day AS
    SELECT p.*, k.task, k.segment, k.drafter, CASE k.drafter WHEN '' THEN '' ELSE k.drafter || '-1' END AS revision,
        k.sampling_bucket, k.prompt_bucket, k.mode, k.k, c.rounds, c.num_empty_rounds, c.num_tokens, c.proposed,
        c.trials, c.accepts, {", ".join(f"bench.products({of}) AS {name}" for name, of in _PRODUCTS.items())},
        CASE WHEN p.purpose <> 'traffic' THEN p.purpose WHEN place %% 50 = 0 THEN 'exploring'
            WHEN k.k = 0 THEN 'not_faster' ELSE 'faster' END AS reason
    FROM bench.picked AS p JOIN bench.keys AS k USING (key) JOIN bench.counts AS c USING (key, variant) ORDER BY place;
"""
#: Ids have the length of UUIDs.
_TRAFFIC_ID: Final = "'7c9e6679-7425-40de-944b-' || lpad((%(before)s + place)::text, 12, '0')"
_ID: Final = f"""CASE purpose WHEN 'traffic' THEN {_TRAFFIC_ID}
    ELSE 'probe-' || %(day)s || '-' || task || '-' || drafter || '-' || variant END"""
_RUNS: Final = f"""
    INSERT INTO decode_runs (decoded_at, ledger_id, recorded_in, recorded_at, job_id, attempt, purpose, task, segment,
        target_revision, drafter, draft_revision, engine, sampling_bucket, prompt_bucket, is_evidence, mode,
        num_draft_tokens, reason, device, rounds, num_empty_rounds, num_cropped, proposed, trials, accepts, chances,
        num_prompt_tokens, num_tokens, batch_size, queue_s, time_to_first_token_s, wall_s, device_s, decode_batch_id)
    SELECT %(start)s + after, %(before)s + place, %(before)s + place, %(start)s + after,
        {_ID}, 1, purpose, task, segment, %(target)s, drafter, revision, %(engine)s, sampling_bucket, prompt_bucket,
        true, mode, k, reason, %(device)s, rounds, num_empty_rounds, 0, proposed, trials, accepts, '{{}}',
        40 + place %% 700, num_tokens, 1 + place %% 8,
        (place %% 1009) * .002::float8, .05::float8, rounds * .03::float8, rounds * .03::float8 / (1 + place %% 8),
        ('7c9e6679-7425-40de-944b-' || lpad(((%(before)s + place) / 4)::text, 12, '0'))::uuid
    FROM bench.day
"""
_SHADOWS: Final = f"""
    INSERT INTO evidence_rows (decoded_at, ledger_id, recorded_in, recorded_at, job_id, task, segment, target_revision,
        drafter, draft_revision, engine, sampling_bucket, prompt_bucket, source, is_whole, num_draft_tokens, rounds,
        num_empty_rounds, num_cropped, proposed, trials, accepts, chances, num_prompt_tokens, num_output_tokens)
    SELECT %(start)s + after, -(%(before)s + place), %(before)s + place, %(start)s + after,
        {_TRAFFIC_ID}, d.task, d.segment, %(target)s, s.drafter, s.drafter || '-1', %(engine)s, d.sampling_bucket,
        d.prompt_bucket, 'shadow', true, s.k, s.rounds, s.num_empty_rounds, 0, s.proposed, s.trials, s.accepts, '{{}}',
        40 + place %% 700, d.num_tokens
    FROM bench.day AS d JOIN LATERAL (
        SELECT k.drafter, k.k, c.* FROM bench.keys AS k JOIN bench.counts AS c USING (key)
        WHERE k.key = d.key + {SHADOW_WAY} AND c.variant = d.variant
    ) AS s ON true
    WHERE has_shadow
"""


def _hours(source: str, mode: str, purpose: str, seconds: str) -> str:
    """The sums of the day's jobs by hour."""
    names = (*_BY_POSITION, *_PRODUCTS)
    sums = (
        f"(ARRAY[{', '.join(f'sum({name}[{i}])' for i in range(1, MOST_POSITIONS + 1))}])[1:k]::bigint[] AS {name}"
        for name in names
    )
    return f"""
        SELECT extract(hour FROM after)::int AS hour, task, segment, drafter, revision, sampling_bucket, prompt_bucket,
            {purpose} AS purpose, {mode} AS mode, k, count(*) AS num_jobs, sum(rounds)::bigint AS rounds,
            sum(num_empty_rounds)::bigint AS num_empty_rounds, sum(40 + place %% 700)::bigint AS num_prompt_tokens,
            sum(num_tokens)::bigint AS num_tokens, sum(rounds * rounds)::bigint AS rounds_sq,
            sum(num_tokens * num_tokens)::bigint AS tokens_sq, sum(rounds * num_tokens)::bigint AS rounds_tokens,
            {", ".join(sums)}, {seconds} * sum(rounds * .03::float8) AS wall_s,
            {seconds} * sum(rounds * .03::float8 / (1 + place %% 8)) AS device_s
        FROM {source}
        GROUP BY 1, task, segment, drafter, revision, sampling_bucket, prompt_bucket, purpose, mode, k
    """


_SHADOWS_OF_DAY: Final = f"""(
    SELECT d.after, d.place, d.task, d.segment, d.sampling_bucket, d.prompt_bucket, 'traffic' AS purpose,
        'shadow' AS mode, k.k, k.drafter, k.drafter || '-1' AS revision, c.*,
        {", ".join(f"bench.products({of}) AS {name}" for name, of in _PRODUCTS.items())}
    FROM bench.day AS d JOIN bench.keys AS k ON k.key = d.key + {SHADOW_WAY}
        JOIN bench.counts AS c ON c.key = k.key AND c.variant = d.variant
    WHERE d.has_shadow
) AS shadows"""
_SUMS: Final = (
    "CREATE UNLOGGED TABLE bench.hours AS "
    + _hours("bench.day", "mode", "purpose", "1")
    + " UNION ALL "
    + _hours(_SHADOWS_OF_DAY, "mode", "purpose", "0")
)
_HOURLY: Final = f"""
    INSERT INTO acceptance_hourly (bucket, task, segment, target_revision, drafter, draft_revision, engine,
        sampling_bucket, prompt_bucket, purpose, mode, num_draft_tokens, num_jobs, rounds, num_empty_rounds,
        num_prompt_tokens, num_tokens, rounds_sq, tokens_sq, rounds_tokens, {", ".join((*_BY_POSITION, *_PRODUCTS))},
        wall_s, device_s)
    SELECT %(start)s + hour * interval '1 hour', task, segment, %(target)s, drafter, revision, %(engine)s,
        sampling_bucket, prompt_bucket, purpose, mode, k, num_jobs, rounds, num_empty_rounds, num_prompt_tokens,
        num_tokens, rounds_sq, tokens_sq, rounds_tokens, {", ".join((*_BY_POSITION, *_PRODUCTS))}, wall_s, device_s
    FROM bench.hours
"""


@dataclass(frozen=True, slots=True)
class Filled:
    """What was filled: runs of traffic, and the moment before which the last one was decoded."""

    num_runs: int
    end: datetime


def fill_ledger(connection: psycopg.Connection, num_runs: int, num_prompts: int, tell: Callable[[int], None]) -> Filled:
    """Write about `num_runs` runs of traffic, and `num_prompts` probes a task, drafter and day; then the indexes."""
    # A full hour, so that no hour belongs to two days.
    ((end,),) = connection.execute("SELECT date_trunc('hour', now() + %s)", (AHEAD,)).fetchall()
    given: dict[str, Any] = {"a_day": max(1, round(num_runs / NUM_DAYS)), "prompts": num_prompts, "device": DEVICE}
    _draw_a_day(connection, given)
    with without_indexes(connection, "decode_runs"), without_indexes(connection, "evidence_rows"):
        for day in range(NUM_DAYS):
            given |= {"target": _in_force(_TARGETS, day), "engine": _in_force(_ENGINES, day), "day": day}
            given |= {"start": end - timedelta(days=NUM_DAYS - day), "before": given["a_day"] * day + 10_000 * day}
            # Rows of a table that the same transaction has made are not logged.
            with connection.transaction():
                connection.execute(
                    "SELECT make_partitions(ARRAY[(d AT TIME ZONE 'UTC')::date, (d AT TIME ZONE 'UTC')::date + 1]) "
                    "FROM (SELECT %s AS d) AS of",
                    (given["start"],),
                )
                for statement in (_RUNS, _SHADOWS, _HOURLY):
                    connection.execute(statement, given)
            tell(given["a_day"] * (day + 1))
    return Filled(given["a_day"] * NUM_DAYS, end)


def _in_force(changes: tuple[tuple[str, int], ...], day: int) -> str:
    return [name for name, since in changes if since <= day][-1]


def _draw_a_day(connection: psycopg.Connection, given: dict[str, Any]) -> None:
    keys = all_keys()
    for statement in filter(str.strip, _TABLES.split(";\n")):
        connection.execute(statement)
    with connection.cursor() as cursor:
        with cursor.copy("COPY bench.keys FROM STDIN") as copy:
            for key in keys:
                copy.write_row(
                    (key.key, key.task, key.segment, key.sampling_bucket, key.prompt_bucket, key.drafter,
                     key.num_draft_tokens, key.mode, key.upper)
                )  # fmt: skip
        with cursor.copy("COPY bench.counts FROM STDIN") as copy:
            for key in keys:
                for variant, counts in enumerate(variants(key)):
                    numbers = [getattr(counts, name) for name in _NUMBERS]
                    copy.write_row((key.key, variant, *numbers, *(list(getattr(counts, n)) for n in _BY_POSITION)))
    given = given | {"uppers": [key.upper for key in keys]}
    with psycopg.ClientCursor(connection) as cursor:
        for statement in (*filter(str.strip, _DAY.split(";\n")), _SUMS):
            cursor.execute(statement, given)


@contextmanager
def without_indexes(connection: psycopg.Connection, table: str) -> Iterator[None]:
    """Take a partitioned table's indexes and checks away, and build them behind the rows, which takes half the time.

    Rows are not checked again: the counts are made by AcceptanceCounts, which checks them.
    """
    indexes = connection.execute(
        "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index "
        "WHERE indrelid = %s::regclass AND NOT indisprimary",
        (table,),
    ).fetchall()
    constraints = connection.execute(
        "SELECT conname, contype, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = %s::regclass AND contype IN ('p', 'c')",
        (table,),
    ).fetchall()
    for name, _ in indexes:
        connection.execute(f"DROP INDEX {name}".encode())
    for name, _, _ in constraints:
        connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT {name}".encode())
    yield
    connection.execute("SET maintenance_work_mem = '1GB'")
    for name, kind, definition in constraints:
        late = " NOT VALID" if kind == "c" else ""
        connection.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}{late}".encode())
    for _, definition in indexes:
        connection.execute(definition.replace(" ON ONLY ", " ON ").encode())


NUM_PROMPTS: Final = 4
_K: Final = 3
_SENT: Final = """
    INSERT INTO probe_runs (job_id, schedule_id, scheduled_for, task, probe_set, position, prompt_id, purpose, drafter,
        num_draft_tokens, payload_sha256, sent_at, compared_at)
    SELECT r.job_id, 'measure', decoded_at - interval '1 minute', r.task, s.version,
        right(r.job_id, 1)::int, p.prompt_id, purpose, nullif(drafter, ''),
        nullif(r.num_draft_tokens, 0), sha256(r.job_id::bytea), decoded_at - interval '1 minute',
        CASE purpose WHEN 'probe' THEN decoded_at + interval '1 hour' END
    FROM decode_runs AS r JOIN probe_sets AS s ON s.task = r.task AND s.is_active
        JOIN probe_prompts AS p ON p.task = s.task AND p.version = s.version AND p.position = right(r.job_id, 1)::int
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
    CostStore(database).save(CostSubject("host-1", DEVICE, "transformers-5.23.0/bfloat16", "target-2", {}), costs)


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
                prompt_tokens=200.0, texts=1.0, ends=1.0,
                proposed=(40.0,) * len(trials), chances=trials, trials=trials,
                accepts=tuple(t * key.alpha for t in trials),
                accepts_w2=tuple((t * key.alpha) ** 2 for t in trials),
                chances_w2=tuple(t**2 for t in trials),
                accepts_chances_w2=tuple(t**2 * key.alpha for t in trials),
            )  # fmt: skip
            packed = pack(KeyEvidence.empty(filled.end).with_job(job, timedelta(days=3)))
            columns = its.columns
            cursor.execute(
                f"INSERT INTO acceptance_state ({', '.join(columns)}, as_of, num_jobs, evidence, last_ledger_id, "
                f"changed_in) VALUES ({', '.join(['%s'] * len(columns))}, %s, 5000, %s, 1, 1)".encode(),
                (*columns.values(), filled.end, packed),
            )
