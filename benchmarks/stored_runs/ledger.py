"""Runs of 60 days in the ledger, and their hourly and daily sums, made by the server itself.

One day is drawn, by hashes of its places, so the same call gives the same rows. The other days repeat it under their
own ids, moments and revisions: the queries' time depends on how many rows there are, not on how the days differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg

from benchmarks.stored_runs.keys import MOST_POSITIONS, NUM_VARIANTS, SHADOW_WAY, all_keys, variants

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
