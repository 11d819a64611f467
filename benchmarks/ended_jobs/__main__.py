"""Claims, outcomes, queries and retention with few and with millions of ended jobs.

    python -m benchmarks.ended_jobs                       # 10,000 beside 1,000,000
    nice python -m benchmarks.ended_jobs --jobs 10000000  # 20 GB of disk

A PostgreSQL of its own is started in a temporary folder, with a database for each size. Each is measured twice: with
the indexes of now, then with those of before retention was built. Milliseconds are medians; "-" took longer than a
minute. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from alphaloop.embedded.postgres import EmbeddedPostgres
from alphaloop.store.database import Database
from alphaloop.store.schema import upgrade
from benchmarks.ended_jobs.filling import fill, sizes, use_indexes_of_before
from benchmarks.ended_jobs.measuring import LIMIT_S, measure, plans

console = Console(stderr=True)


def main() -> None:
    """Print a table, the plans, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="ended jobs of the large table")
    parser.add_argument("--baseline", type=int, default=10_000, help="ended jobs of the small table")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where there is room; the temporary folder by default"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        server = EmbeddedPostgres(Path(folder), durable=False)
        try:
            url = server.start()
            found = [measured(url, num_jobs, options.repeats) for num_jobs in (options.baseline, options.jobs)]
        finally:
            server.stop()
    show(found)
    print(json.dumps({"conditions": conditions(), "sizes": found}))


def measured(server: str, num_jobs: int, repeats: int) -> dict[str, Any]:
    """The figures of one size, with the indexes of now and of before, and the plans of now."""
    name = f"jobs_{num_jobs}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    url = SecretStr(f"{server.rsplit('/', 1)[0]}/{name}")
    upgrade(url)
    found: dict[str, Any] = {"num_jobs": num_jobs}
    with psycopg.connect(url.get_secret_value(), autocommit=True) as connection:
        fill(connection, num_jobs, lambda done: console.print(f"{done:,} of {num_jobs:,} jobs"))
        for which in ("now", "before"):
            if which == "before":
                use_indexes_of_before(connection)
            with psycopg.connect(url.get_secret_value(), autocommit=True) as limited:
                limited.execute(sql.SQL("ALTER ROLE CURRENT_USER SET statement_timeout = {}").format(f"{LIMIT_S}s"))
                limited.execute(sql.SQL("SET statement_timeout = {}").format(f"{LIMIT_S}s"))
                with Database(url) as database:
                    found[which] = measure(database, limited, num_jobs, repeats)
                found[f"{which}_plans"] = plans(limited, num_jobs)
                limited.execute("ALTER ROLE CURRENT_USER RESET statement_timeout")
            found[f"{which}_bytes"] = sizes(connection)
    return found


def show(found: list[dict[str, Any]]) -> None:
    """The times side by side, then the plans of the large table."""
    table = Table(title="milliseconds")
    table.add_column("what")
    for one in found:
        for which in ("before", "now"):
            table.add_column(f"{one['num_jobs']:,} {which}", justify="right")
    for what in found[0]["now"]:
        cells = [one[which][what] for one in found for which in ("before", "now")]
        table.add_row(what, *("-" if ms is None else f"{ms:,.2f}" for ms in cells))
    console.print(table)
    for what, plan in found[-1]["now_plans"].items():
        console.print(f"\n{what}", style="bold")
        console.print(plan, markup=False, highlight=False)


def conditions() -> dict[str, Any]:
    """The machine, and how busy it was."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": cpu, "num_cpus": os.cpu_count(), "load": os.getloadavg(), "fsync": False}


if __name__ == "__main__":
    main()
