"""`python -m scheduler run`: measure at every interval while leading, until SIGTERM. `once`: one run now."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from alphaloop import logs
from alphaloop.claim_check.store import ContentStore
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.exit_codes import ExitCode
from alphaloop.explaining.explanation import next_jobs
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.retention import longest_job_retention
from alphaloop.kafka.topics import ensure_topics
from alphaloop.notifying.sinks import Sink, open_sinks
from alphaloop.settings import Settings, load_settings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.schedule import AdvisoryLock, LeaderLease
from alphaloop.store.terms import Term
from scheduler.leadership import LeaderLock
from scheduler.loop import SCHEDULE_ID, Scheduler
from scheduler.metrics import SchedulerMetrics
from scheduler.notifying import Notifier
from scheduler.staying import stay

log = logging.getLogger("scheduler")

MANUAL_SCHEDULE_ID: Final = "manual"
#: Checks that a leader behind a pooler may miss before another process leads.
_LEASE_CHECKS: Final = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler; returns why it ended, one of alphaloop.exit_codes."""
    options = _options(argv)
    try:
        settings = load_settings(options.configs, profile=options.profile)
        if options.data_dir is not None:
            settings = settings.model_copy(update={"data_dir": options.data_dir.absolute()})
        settings = with_running_stack(settings)
        logs.configure(settings.logs.level, settings.logs.format)
        return _measure(settings, stays=options.mode == "run")
    except AlphaloopError as error:
        log.error(
            "%s", error.message, extra={"action": "scheduler_failed", "code": error.code, "hint": error.hint or ""}
        )
        return ExitCode.FAILED


def _measure(settings: Settings, *, stays: bool) -> ExitCode:
    if settings.postgres.url is None or settings.kafka.bootstrap_servers is None:
        lacking = "postgres.url" if settings.postgres.url is None else "kafka.bootstrap_servers"
        raise ConfigError(
            f"{lacking}: not set, and nothing runs under {settings.data_dir}",
            hint="set DATABASE_URL and KAFKA_BOOTSTRAP_SERVERS, or start `alphaloop up`",
        )
    timeout_s = settings.postgres.connect_timeout_s
    with Database(
        settings.postgres.url,
        pool_size=settings.postgres.pool_size,
        connect_timeout_s=timeout_s,
        limits=settings.postgres.long_limits(),
    ) as database:
        sinks = open_sinks(settings.scheduler.notify_urls)
        if not stays:
            _measure_once(settings, database, sinks)
            return ExitCode.STOPPED

        def lead(term: Term, producer: Producer, metrics: SchedulerMetrics) -> Scheduler:
            return _scheduler(settings, database.guarded(term.check), producer, metrics, SCHEDULE_ID)

        def notify(term: Term, metrics: SchedulerMetrics) -> Notifier:
            return Notifier(database.guarded(term.check), sinks, settings.scheduler, metrics)

        lock: LeaderLock = AdvisoryLock(settings.postgres.url, connect_timeout_s=timeout_s)
        if not database.keeps_sessions:
            lock = LeaderLease(database, _owner(), lease_s=_LEASE_CHECKS * settings.scheduler.leader_check_s)
        return stay(settings, database, lock, lead, notify if sinks else None)


def _measure_once(settings: Settings, database: Database, sinks: Sequence[Sink]) -> None:
    """One run now, and its notifications. A server that is away ends it at once, because somebody waits for it."""
    database.check_revision()
    ensure_topics(settings.kafka, settings.tasks)
    producer = Producer(settings.kafka, client_id="alphaloop-scheduler")
    try:
        now, metrics = DatabaseClock(database).measure(), SchedulerMetrics()
        notifier = Notifier(database, sinks, settings.scheduler, metrics)
        notifier.add_sinks(now)
        _scheduler(settings, database, producer, metrics, MANUAL_SCHEDULE_ID).run_once(now)
        notifier.send_due(now)
    finally:
        producer.close()


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _scheduler(
    settings: Settings, database: Database, producer: Producer, metrics: SchedulerMetrics, schedule_id: str
) -> Scheduler:
    return Scheduler(
        database,
        producer,
        settings.scheduler,
        tasks=settings.tasks,
        report_folder=settings.report_folder,
        owner=_owner(),
        metrics=metrics,
        message_retention=lambda: longest_job_retention(settings.kafka),
        contents=ContentStore.of(settings.claim_check),
        change_jobs=settings.policy.change_jobs,
        schedule_id=schedule_id,
        prices=settings.report,
        next_jobs=lambda figures, now: next_jobs(database, settings, figures, now),
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler", description=__doc__, epilog="example: python -m scheduler once --profile local"
    )
    parser.add_argument("mode", choices=("run", "once"), help="stay and measure at every interval, or one run now")
    parser.add_argument("--configs", type=Path, default=_path("ALPHALOOP_CONFIGS"), help="folder of TOML files")
    parser.add_argument(
        "--profile", default=os.environ.get("ALPHALOOP_PROFILE") or None, help="one more file of it, over the others"
    )
    parser.add_argument("--data-dir", type=Path, default=None, help="where a running `alphaloop up` keeps its data")
    return parser.parse_args(argv)


def _path(variable: str) -> Path | None:
    return Path(os.environ[variable]) if os.environ.get(variable) else None


if __name__ == "__main__":
    sys.exit(main())
