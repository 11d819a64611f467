"""The console with many tasks: how long its pages take to be painted, and their pictures.

    python -m benchmarks.console                       # 1,000 tasks, 100,000 jobs and 10,000 batches
    python -m benchmarks.console --jobs 10000000                       # 20 GB of disk
    python -m benchmarks.console --tasks 6 --pictures docs/guides/console    # the guide's pictures

A broker and a database of its own are started in a temporary folder. Milliseconds are medians over the repeats, of the
first contentful paint in Chromium and of the server's answer; below them what the browser takes for a page of one
word. Last line: JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
from playwright.sync_api import Browser
from pydantic import SecretStr
from rich.table import Table

from alphaloop.console.app import ConsoleServer
from alphaloop.dead_letters.reading import DeadLetterFilter, newest_dead_letters
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.settings import PriceSettings, Settings, load_settings
from alphaloop.store import schema
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.known_jobs import BatchStore, JobPages
from alphaloop.store.workers import WorkerStore
from benchmarks import ended_jobs as ended_jobs
from benchmarks.console.filling import RUNNING_JOB, fill, find, list_batches, plans, send_messages
from benchmarks.console.pictures import chromium, settle, take
from benchmarks.reporting import console, parser_of

#: A page of batches much older than the newest.
_FAR: Final = f"/batches?behind=batch&at={(datetime.now(UTC) - timedelta(days=5)).isoformat().replace('+', '%2B')}"
PATHS: Final = (
    *("/", "/tasks", "/tasks?behind=customer-0500", "/tasks/code", "/batches", _FAR, "/dead-letters", "/drift"),
    *("/drafts", "/reports", "/cost", "/cost?by=segment&since=7d"),
    # What is common, what is rare, and what is nowhere.
    *(
        "/jobs",
        "/jobs?task=task-7",
        "/jobs?task=task-0&status=failed",
        "/jobs?since=3d&until=2d",
        "/jobs?status=expired",
    ),
    "/jobs?task=nowhere&since=30d&until=20d",
)
#: What the browser itself takes on this machine at this moment.
_ONE_WORD: Final = "data:text/html,<p>word</p>"


def main() -> None:
    """Print a table, and the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=100_000, help="ended jobs beside those of the tasks")
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--pages", default="", help="only pages whose address begins so")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pictures", type=Path, default=None, help="only take pictures, into this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = load_settings(profile="local", overrides={"data_dir": folder, "embedded": {"broker": "auto"}})
        with EmbeddedStack(asked, on_event=console.print) as settings:
            if options.pictures is not None:
                pictures(settings, options.tasks, options.pictures)
                return
            _fill(settings, options.tasks, options.jobs, options.batches)
            with closing(ConsoleServer(settings)) as server, chromium() as browser:
                found = [
                    measured(browser, server.url, path, options.repeats)
                    for path in PATHS
                    if path.startswith(options.pages)
                ]
                least_ms = statistics.median(first_paint(browser, _ONE_WORD) for _ in range(options.repeats))
    show(found)
    console.print(f"a page of one word, from no server: {least_ms:.0f} ms")
    conditions = {
        "tasks": options.tasks,
        "jobs": options.jobs,
        "batches": options.batches,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    print(json.dumps({"conditions": conditions, "least_paint_ms": least_ms, "pages": found}))


def pictures(settings: Settings, num_tasks: int, folder: Path) -> None:
    """Fill the servers, let a scheduler measure once and report, and take pictures of every page."""
    url, brokers = settings.postgres.url, settings.kafka.bootstrap_servers
    assert url is not None
    assert brokers is not None
    schema.upgrade(url)
    password = secrets.token_urlsafe()
    signed = settings.console.model_copy(update={"password": SecretStr(password), "http_port": 0})
    prices = PriceSettings(per_hour=2.5, currency="EUR")
    settings = settings.model_copy(update={"console": signed, "prices": prices})
    once = [sys.executable, "-m", "scheduler", "--profile", "local", "--data-dir", str(settings.data_dir), "once"]
    servers = {
        "DATABASE_URL": url.get_secret_value(),
        "KAFKA_BOOTSTRAP_SERVERS": brokers,
        "ALPHALOOP_PRICES": prices.model_dump_json(),
    }
    with Database(url) as database:
        now = datetime.now(UTC)
        loads = fill(database, plans(num_tasks), now=now, has_drift=False)
        subprocess.run(once, check=True, timeout=300, env={**os.environ, **servers})
        find(database, now)  # made up: a scheduler finds its own over many runs
        send_messages(settings, database, plans(1)[0])
        addresses = pages_of(settings, database)
        for load in loads:
            WorkerStore(database).say(load)
    with closing(ConsoleServer(settings)) as server, chromium() as browser:
        for path in take(browser, server.listens_at, folder, addresses, password):
            console.print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def pages_of(settings: Settings, database: Database) -> dict[str, str]:
    """Every page, by the name of its picture."""
    event = DriftEventStore(database).open_events()[-1]
    ended = next(job for job in JobPages(database).newest(100).jobs if job.status == "succeeded")
    batch = BatchStore(database).page(1)[0]
    letter = newest_dead_letters(settings.kafka, DeadLetterFilter(), 1)[0].shown["at"]
    return {
        "now": "/",
        "tasks": "/tasks",
        "task": "/tasks/code",
        "jobs": "/jobs",
        "job": f"/job?id={ended.job_id}",
        "job-running": f"/job?id={RUNNING_JOB}",
        "batches": "/batches",
        "batch": f"/batch?id={batch.id}",
        "dead-letters": "/dead-letters",
        "dead-letter": f"/dead-letter?at={letter}",
        "redrive": "/dead-letters/redrive?task=code",
        "cost": "/cost",
        "drift": "/drift",
        "drift-event": f"/drift/{event.id}",
        "drafts": "/drafts",
        "reports": "/reports",
        "report": "/report",
    }


def measured(browser: Browser, url: str, path: str, repeats: int) -> dict[str, Any]:
    """Medians of one page, opened anew each time: what the browser paints first, and what the server takes."""
    paints, answers = [], []
    warm = browser.new_page()
    settle(warm, url + path)
    warm.close()
    for _ in range(repeats):
        began = time.perf_counter()
        with urllib.request.urlopen(url + path) as answer:
            size = len(answer.read())
        answers.append(1000 * (time.perf_counter() - began))
        paints.append(first_paint(browser, url + path))
    return {"path": path, "paint_ms": statistics.median(paints), "answer_ms": statistics.median(answers), "bytes": size}


def first_paint(browser: Browser, address: str) -> float:
    """Milliseconds from the navigation of a new page to its first contentful paint."""
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
    paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return float(paint_ms)


def show(found: list[dict[str, Any]]) -> None:
    """One row a page."""
    table = Table("page", "first paint, ms", "answer, ms", "kB", box=None)
    for one in found:
        table.add_row(one["path"], f"{one['paint_ms']:.0f}", f"{one['answer_ms']:.0f}", f"{one['bytes'] / 1000:.0f}")
    console.print(table)


def _fill(settings: Settings, num_tasks: int, num_jobs: int, num_batches: int) -> None:
    assert settings.postgres.url is not None
    schema.upgrade(settings.postgres.url)
    if num_jobs:
        with psycopg.connect(settings.postgres.url.get_secret_value(), autocommit=True) as connection:
            ended_jobs.fill(connection, num_jobs, lambda done: console.print(f"{done} jobs"))
    with Database(settings.postgres.url) as database:
        fill(database, plans(num_tasks), now=datetime.now(UTC))
        list_batches(database, num_batches, datetime.now(UTC))


if __name__ == "__main__":
    main()
