"""How long a worker takes to know what it knows: the state of 1,000 tasks, against the same from hourly sums.

    python -m benchmarks.state                    # 1,000 tasks x 10 draft revisions x 4 sampling x 3 prompt buckets
    python -m benchmarks.state --tasks 100

A PostgreSQL of its own is started in a temporary folder and filled: 120,000 rows of acceptance_state, and
acceptance_hourly with `--hours` hours of each key, where a real window of 14 days has up to 336. A worker serves two of
the ten draft revisions, so 24,000 rows are its own. The baseline reads the hours of those keys by their index and adds
them up, as workers did before acceptance_state; it leaves out half of what the state holds (second-order sums, and what
came recently). Medians. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence, Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer
from alphaloop.embedded.postgres import EmbeddedPostgres
from alphaloop.store.acceptance_state import AcceptanceStateStore, add_jobs, lock_keys
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.exchange import one_exchange
from alphaloop.store.packed_evidence import pack
from alphaloop.store.schema import upgrade
from worker.deciding.evidence_cache import EvidenceCache

TARGET, ENGINE = "target", "engine"
HALF_LIFE: Final = timedelta(days=3)
NOW: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
SAMPLING: Final = ("greedy", "t<=0.5", "t<=1.0", "t>1.0")
PROMPTS: Final = ("<=256", "<=1024", "<=4096")
#: Ten revisions that decoded at some time: of a draft model at k = 5 and of look-up at k = 12. The newest two serve.
DRAFTS: Final = tuple((name, f"r{n}", k) for n in range(5) for name, k in (("small", 5), ("lookup", 12)))
SERVED: Final = {"small": "r4", "lookup": "r4"}

_HOURS: Final = text("""
    SELECT task, drafter, sampling_bucket, prompt_bucket, bucket, num_draft_tokens, num_jobs, rounds, num_empty_rounds,
           num_tokens, proposed, trials, accepts
    FROM acceptance_hourly
    WHERE task = :task AND bucket > :since AND target_revision = :target AND engine = :engine
      AND (drafter, draft_revision) IN (('', ''), ('small', 'r4'), ('lookup', 'r4'))
""")


def main() -> None:
    """Print a table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--hours", type=int, default=2, help="hours of each key, for the baseline")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder), durable=False)
        try:
            url = SecretStr(server.start())
            upgrade(url)
            with Database(url) as database:
                found = measure(database, options.tasks, options.hours, options.repeats, random.Random(options.seed))
        finally:
            server.stop()
    table = Table(title=f"{found['rows']:,} rows of state, {found['hour_rows']:,} of hours")
    for column in ("what", "ms"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for name, ms in found["ms"].items():
        table.add_row(name, f"{ms:,.2f}")
    Console(stderr=True).print(table)
    print(json.dumps(found))


def measure(database: Database, num_tasks: int, num_hours: int, num_repeats: int, rng: random.Random) -> dict[str, Any]:
    """Milliseconds by what was timed, and how many rows there were."""
    tasks = [f"task-{n:04d}" for n in range(num_tasks)]
    rows, hour_rows = fill(database, tasks, num_hours, rng)
    store = AcceptanceStateStore(database)
    every = {name: revision for name, revision in SERVED.items()}

    def timed(act: Callable[[], object], repeats: int = num_repeats) -> float:
        act()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        return 1000 * statistics.median(times)

    read = store.read(TARGET, ENGINE, every)
    evidence_cache = new_evidence_cache(database)
    evidence_cache.refresh()
    now = NOW + timedelta(seconds=1)
    task = tasks[len(tasks) // 2]
    small = DrafterState("small", SERVED["small"], 5)
    place = Place(task, small.name, small.revision)
    leaves = evidence_cache.standing(place, now).leaves
    pair = PairPosterior.of(evidence_cache.of_tasks(small, now), 5)
    some = [(row.key, one_job(rng, 5)) for row in read.rows[: 4 * 3]]

    def record_batch() -> None:
        with database.begin() as connection:
            with one_exchange(connection) as driver:
                locked = lock_keys(driver, some)
            ledger_ids, _ = locked.ledger_ids()
            add_jobs(driver, locked, some, ledger_ids, HALF_LIFE)

    def all_rows() -> list[object]:
        found: list[object] = []
        for n in range(5):
            found += store.read(TARGET, ENGINE, {"small": f"r{n}", "lookup": f"r{n}"}).rows
        return found

    ms = {
        f"a worker's {len(read.rows):,} rows, read": timed(lambda: store.read(TARGET, ENGINE, every)),
        f"every one of {rows:,} rows, read": timed(all_rows),
        "a read when nothing changed": timed(lambda: store.read(TARGET, ENGINE, every, since=read.seen), 50),
        "one task of 120 keys, read and unpacked": timed(lambda: [row.evidence for row in store.of_task(task)], 50),
        "a drafter of a task, from memory, faded": timed(lambda: evidence_cache.standing(place, now), 200),
        "its posterior": timed(lambda: infer(leaves, some[0][0], 5, pair), 50),
        "a drafter's posterior over all tasks": timed(lambda: PairPosterior.of(evidence_cache.of_tasks(small, now), 5)),
        "12 jobs of 12 keys, added": timed(record_batch, 50),
        f"baseline: hours of one task, {num_hours} of each key": timed(lambda: from_hours(database, task), 20),
        f"baseline: hours of all tasks, {num_hours} of each key": timed(
            lambda: [from_hours(database, one) for one in tasks], 1
        ),
    }
    return {"tasks": num_tasks, "rows": rows, "worker_rows": len(read.rows), "hour_rows": hour_rows, "ms": ms}


def new_evidence_cache(database: Database) -> EvidenceCache:
    """As a worker has it."""
    return EvidenceCache(
        AcceptanceStateStore(database),
        DraftRegistry(database),
        target_revision=TARGET,
        engine=ENGINE,
        drafters=SERVED,
        half_life=HALF_LIFE,
    )


def from_hours(database: Database, task: str) -> dict[tuple[str, ...], EvidenceSums]:
    """The first-order sums of each key of a task, by fading and adding up its hours."""
    with database.begin() as connection:
        found = connection.execute(
            _HOURS, {"task": task, "since": NOW - timedelta(days=14), "target": TARGET, "engine": ENGINE}
        ).all()
    sums: dict[tuple[str, ...], EvidenceSums] = {}
    for row in found:
        hour = EvidenceSums(
            row.bucket,
            float(row.num_jobs),
            float(row.num_jobs),
            float(row.rounds - row.num_jobs),
            float(row.rounds - row.num_empty_rounds),
            float(row.num_tokens - row.num_jobs),
            float(row.num_tokens),
            proposed=tuple(row.proposed),
            trials=tuple(row.trials),
            accepts=tuple(row.accepts),
            chances=(row.rounds - row.num_jobs, *row.accepts[:-1]) if row.accepts else (),
        )
        key = (row.drafter, row.sampling_bucket, row.prompt_bucket)
        faded = hour.faded(NOW, HALF_LIFE)
        sums[key] = sums[key] + faded if key in sums else faded
    return sums


def fill(database: Database, tasks: Sequence[str], num_hours: int, rng: random.Random) -> tuple[int, int]:
    """Write state and hours; the numbers of their rows. Memories are drawn from a few dozen."""
    evidence_by_key = {k: [pack(some_memory(rng, k)) for _ in range(24)] for k in (5, 12)}

    def state() -> Iterator[tuple[Any, ...]]:
        for task in tasks:
            for name, revision, k in DRAFTS:
                for sampling in SAMPLING:
                    for prompts in PROMPTS:
                        evidence = rng.choice(evidence_by_key[k])
                        yield (task, TARGET, name, revision, ENGINE, sampling, prompts, NOW, 100, evidence, 0, 1)

    keys = "task, target_revision, drafter, draft_revision, engine, sampling_bucket, prompt_bucket"
    with database.dedicated() as connection:
        types = ("text",) * 7 + ("timestamptz", "int8", "bytea", "int8", "int8")
        _copy(
            connection,
            f"acceptance_state ({keys}, as_of, num_jobs, evidence, last_ledger_id, changed_in)",
            types,
            state(),
        )
        connection.execute(
            f"""
            INSERT INTO acceptance_hourly (bucket, {keys}, segment, purpose, mode, num_draft_tokens, num_jobs,
                rounds, num_empty_rounds, num_tokens, rounds_sq, tokens_sq, rounds_tokens, proposed, trials, accepts,
                trials_sq, accepts_sq, accepts_trials, wall_s, device_s)
            SELECT %(now)s::timestamptz - n * interval '5 hours', {keys}, '', 'traffic', 'speculative', k, 50, 1000,
                50, 2400, 21000, 116000, 49000, s, s, s, s, s, s, 30, 20
            FROM acceptance_state, generate_series(1, %(hours)s) AS n,
                LATERAL (SELECT CASE drafter WHEN 'small' THEN 5 ELSE 12 END AS k) AS ks,
                LATERAL (SELECT array_fill(700::bigint, ARRAY[k]) AS s) AS arrays
            """,
            {"now": NOW, "hours": num_hours},
        )
        connection.execute("VACUUM ANALYZE acceptance_state, acceptance_hourly")
        counted = connection.execute(
            "SELECT (SELECT count(*) FROM acceptance_state), (SELECT count(*) FROM acceptance_hourly)"
        ).fetchone()
    assert counted is not None
    return counted[0], counted[1]


def some_memory(rng: random.Random, k: int) -> KeyEvidence:
    """Of a hundred jobs over two weeks."""
    evidence = KeyEvidence.empty(NOW - timedelta(days=14))
    for n in range(100):
        evidence = evidence.with_job(one_job(rng, k, NOW - timedelta(days=14 - n * 0.14)), HALF_LIFE)
    return evidence


def one_job(rng: random.Random, k: int, at: datetime = NOW) -> EvidenceSums:
    """Thirty rounds of drafts of which each token is accepted seven times in ten."""
    counts = AcceptanceCounts().with_round(0, 0, num_emitted=1)
    for _ in range(30):
        accepted = 0
        while accepted < k and rng.random() < 0.7:
            accepted += 1
        counts = counts.with_round(k, accepted, num_emitted=accepted + 1)
    return EvidenceSums.of_job(counts, k, at, counts.num_tokens, 200)


def _copy(connection: Any, into: str, types: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    with connection.cursor().copy(f"COPY {into} FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


if __name__ == "__main__":
    main()
