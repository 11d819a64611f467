"""The documents' queries and the scheduler's reads, with many stored runs.

    python -m benchmarks.stored_runs --runs 1000000
    nice python -m benchmarks.stored_runs   # 20 million runs: 20 GB of disk, half an hour

A PostgreSQL of its own is started in a temporary folder and filled with runs of 60 days under 1,000 keys (task,
segment, drafter and k). Then every query of docs/ is asked, and the scheduler measures. Nothing is
forced to disk, and a query has one process. Milliseconds are medians of warm queries, by the clock and of the server's
processor time, which holds on a busy machine too; "-" took longer than a minute. Last line: JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
from pydantic import SecretStr
from rich.progress import Progress

from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.settings.processes import UNLIMITED
from alphaloop.store.database import Database
from alphaloop.store.job_counts import RollupStore
from alphaloop.store.schema import current, upgrade
from benchmarks.reporting import console, machine, parser_of, table_of
from benchmarks.stored_runs.filling import NUM_PROMPTS, fill_ledger, fill_probes, fill_surroundings
from benchmarks.stored_runs.questions import LIMIT_S, Asked, all_questions, ask
from benchmarks.stored_runs.scheduler_run import Runs, run_scheduler

#: No query may take longer, in milliseconds.
BAR_MS: Final = 300


def main() -> None:
    """Fill, ask, measure; print the tables and the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20_000_000, help="decoded jobs of 60 days")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--data", type=Path, default=None, help="keep the database in this folder, and use the one that is there"
    )
    options = parser.parse_args()
    with server(options.data) as url:
        seconds = {} if current(SecretStr(url)) else fill(url, options.runs)
        with psycopg.connect(url, autocommit=True, options=f"-c statement_timeout={LIMIT_S}s") as connection:
            size = connection.execute("SELECT pg_database_size(current_database())").fetchone()
            # First, because its runs fill tables that people ask.
            runs = run_scheduler(url, options.repeats)
            asked = [ask(connection, one, options.repeats) for one in all_questions() if one.is_query]
    show(asked, runs)
    print(json.dumps(as_json(asked, runs) | {"bytes": size[0] if size else 0, "seconds": seconds, **machine()}))


@contextmanager
def server(data: Path | None) -> Iterator[str]:
    """The address of a running server, whose data are deleted unless they have a folder of their own."""
    with tempfile.TemporaryDirectory() as temporary:
        running = EmbeddedPostgres(data or Path(temporary), durable=False)
        try:
            with psycopg.connect(running.start(), autocommit=True) as connection:
                # So that filling need not write a log.
                connection.execute("ALTER SYSTEM SET wal_level = minimal")
                connection.execute("ALTER SYSTEM SET max_wal_senders = 0")
            running.stop()
            yield running.start()
        finally:
            running.stop()


def fill(url: str, num_runs: int) -> dict[str, float]:
    """Make the schema and every row; returns the seconds that each part took."""
    upgrade(SecretStr(url))
    # A second process would halve the time, not the work; and the processor time of one process is known.
    alone = "ALTER ROLE CURRENT_USER SET max_parallel_workers_per_gather = 0"
    seconds: dict[str, float] = {}
    with psycopg.connect(url, autocommit=True) as connection, Database(SecretStr(url), limits=UNLIMITED) as database:
        connection.execute(alone)
        with _timed(seconds, "ledger"), Progress(console=console) as progress:
            bar = progress.add_task(f"{num_runs:,} runs", total=num_runs)
            filled = fill_ledger(connection, num_runs, NUM_PROMPTS, lambda n: progress.update(bar, completed=n))
        with _timed(seconds, "surroundings"):
            fill_probes(connection, database, filled)
            fill_surroundings(connection, database, filled)
        with _timed(seconds, "statistics"):
            connection.execute("VACUUM ANALYZE jobs")
            connection.execute("ANALYZE")
        with _timed(seconds, "daily sums"):
            RollupStore(database).roll_up(filled.end)
            connection.execute("VACUUM ANALYZE acceptance_daily")
    return seconds


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    console.print(f"==> {what}")
    began = time.perf_counter()
    yield
    seconds[what] = round(time.perf_counter() - began, 1)


def show(asked: list[Asked], runs: Runs) -> None:
    """Two tables: queries, and statements of the scheduler."""
    table = table_of("the documents' queries", "query", "ms", "CPU ms", "rows")
    for number, one in enumerate(asked, 1):
        table.add_row(f"{number:>2} {one.name}", _ms(one.ms), _marked(one.cpu_ms), f"{one.num_rows or 0:,}")
    console.print(table)
    its = f"CPU {runs.run_cpu_s:.1f} s, server {runs.server_cpu_s:.1f} s, memory +{_mib(runs.grown):,.0f} MiB"
    title = f"a run of the scheduler: {runs.run_s:.1f} s, {its}"
    table = table_of(title, "sent from", "times", "ms", "CPU ms", "slowest CPU ms", "rows")
    for kind in sorted(runs.statements, key=lambda one: -one.together_cpu_ms):
        together = _ms(kind.together_ms), _ms(kind.together_cpu_ms)
        table.add_row(kind.name, str(kind.calls[-1]), *together, _marked(kind.slowest_ms), f"{kind.rows[-1]:,}")
    console.print(table)


def as_json(asked: list[Asked], runs: Runs) -> dict[str, Any]:
    """The figures for a machine."""
    return {
        "bar_ms": BAR_MS,
        "queries": {one.name: {"ms": one.ms, "cpu_ms": one.cpu_ms, "rows": one.num_rows} for one in asked},
        "queries_over_bar": [one.name for one in asked if one.cpu_ms is None or one.cpu_ms > BAR_MS],
        "scheduler_cpu_ms": {one.name: round(one.together_cpu_ms, 1) for one in runs.statements},
        "scheduler_over_bar": [one.name for one in runs.statements if one.slowest_ms > BAR_MS],
        "scheduler_run_s": round(runs.run_s, 2),
        "scheduler_run_cpu_s": round(runs.run_cpu_s, 2),
        "scheduler_run_server_cpu_s": round(runs.server_cpu_s, 2),
        "scheduler_memory_mib": round(_mib(runs.grown), 1),
    }


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:,.1f}"


def _marked(ms: float | None) -> str:
    return f"[bold red]{_ms(ms)}[/]" if ms is None or ms > BAR_MS else _ms(ms)


def _mib(num_bytes: int) -> float:
    return num_bytes / 2**20


if __name__ == "__main__":
    main()
