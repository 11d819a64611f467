"""`python -m scheduler run`: measure at every interval while leading, until SIGTERM. `once`: one run now."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from alphaloop import logs
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import cluster_id, ensure_topics
from alphaloop.liveness import ExitCode
from alphaloop.notifying import Sink, open_sinks
from alphaloop.settings import Settings, TasksFile, load_settings
from alphaloop.store.coordination import InstallationStore, LeaderLease
from alphaloop.store.database import POOL_SIZE, Database, DatabaseClock
from scheduler.leadership import LEASE_S, stay
from scheduler.loop import Scheduler
from scheduler.metrics import SchedulerMetrics
from scheduler.notifying import Notifier

log = logging.getLogger("scheduler")

MANUAL_SCHEDULE_ID: Final = "manual"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler; returns why it ended, one of alphaloop.liveness."""
    options = _options(argv)
    try:
        tasks_file = TasksFile(options.configs, options.profile)
        settings = load_settings(options.configs, profile=options.profile)
        if options.data_dir is not None:
            settings = settings.model_copy(update={"data_dir": options.data_dir.absolute()})
        settings = with_running_stack(settings)
        logs.configure(settings.logs.level, settings.logs.format)
        return _measure(settings, tasks_file, stays=options.mode == "run")
    except AlphaloopError as error:
        log.error(
            "%s", error.message, extra={"action": "scheduler_failed", "code": error.code, "hint": error.hint or ""}
        )
        return ExitCode.FAILED


def _measure(settings: Settings, tasks_file: TasksFile, *, stays: bool) -> ExitCode:
    if settings.postgres.url is None or settings.kafka.bootstrap_servers is None:
        lacking = "postgres.url" if settings.postgres.url is None else "kafka.bootstrap_servers"
        raise ConfigError(
            f"{lacking}: not set, and nothing runs under {settings.data_dir}",
            hint="set DATABASE_URL and KAFKA_BOOTSTRAP_SERVERS, or start `alphaloop up`",
        )
    with Database(settings.postgres.url, pool_size=POOL_SIZE, limits=settings.postgres.long_limits()) as database:
        sinks = open_sinks(settings.scheduler.notify_urls)
        if not stays:
            _measure_once(settings, database, sinks)
            return ExitCode.STOPPED
        # A connection of its own: a run that uses all of the pool must not cost the lease.
        with Database(settings.postgres.url, pool_size=1, limits=settings.postgres.limits()) as beside:
            owner = _owner()
            return stay(settings, tasks_file, database, LeaderLease(beside, owner, lease_s=LEASE_S), owner, sinks)


def _measure_once(settings: Settings, database: Database, sinks: Sequence[Sink]) -> None:
    """One run now, and its notifications. A server that is away ends it at once, because its caller waits."""
    database.check_revision()
    InstallationStore(database).belong(cluster_id(settings.kafka), settings.kafka.prefix)
    ensure_topics(settings.kafka, settings.tasks)
    with closing(Producer(settings.kafka, client_id="alphaloop-scheduler")) as producer:
        now, metrics = DatabaseClock(database).measure(), SchedulerMetrics()
        notifier = Notifier(database, sinks, settings.scheduler, metrics)
        notifier.add_sinks(now)
        manual = Scheduler(
            database, producer, settings, owner=_owner(), metrics=metrics, schedule_id=MANUAL_SCHEDULE_ID
        )
        manual.run_once(now)
        notifier.send_due(now)


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler", description=__doc__, epilog="example: python -m scheduler once --profile local"
    )
    parser.add_argument("mode", choices=("run", "once"), help="stay and measure at every interval, or one run now")
    configs, profile = (os.environ.get(f"ALPHALOOP_{name}") or None for name in ("CONFIGS", "PROFILE"))
    parser.add_argument("--configs", type=Path, default=configs, help="folder of TOML files")
    parser.add_argument("--profile", default=profile, help="one more file of it, over the others")
    parser.add_argument("--data-dir", type=Path, default=None, help="where a running `alphaloop up` keeps its data")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
