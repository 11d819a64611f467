"""`python -m scheduler run`: measure at every interval while leading, until SIGTERM. `once`: one run now."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from alphaloop import logs
from alphaloop.embedded.stack import with_running_stack
from alphaloop.endpoint import Endpoint
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.exit_codes import ExitCode
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.retention import longest_job_retention
from alphaloop.kafka.topics import ensure_topics
from alphaloop.liveness import Liveness, Pulse
from alphaloop.settings import Settings, load_settings
from alphaloop.store.clock import DatabaseClock
from alphaloop.store.database import Database
from alphaloop.store.leader_lease import LeaderLease
from alphaloop.store.schedule import AdvisoryLock
from alphaloop.store.terms import Term
from alphaloop.watchdog import Watchdog
from scheduler.leadership import LeaderLock, Leadership
from scheduler.loop import SCHEDULE_ID, Scheduler
from scheduler.metrics import SchedulerMetrics
from scheduler.ticking import Ticker

log = logging.getLogger("scheduler")

MANUAL_SCHEDULE_ID: Final = "manual"
#: Checks that a leader behind a pooler may miss before another process leads.
_LEASE_CHECKS: Final = 6
MAX_CHECK_AGE_S: Final = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler; returns why it ended, one of alphaloop.exit_codes."""
    options = _options(argv)
    try:
        settings = load_settings(options.configs, profile=options.profile)
        if options.data_dir is not None:
            settings = settings.model_copy(update={"data_dir": options.data_dir.absolute()})
        settings = with_running_stack(settings)
        logs.configure(settings.logs.level, settings.logs.format)
        return _measure(settings, stay=options.mode == "run")
    except AlphaloopError as error:
        log.error(
            "%s", error.message, extra={"action": "scheduler_failed", "code": error.code, "hint": error.hint or ""}
        )
        return ExitCode.FAILED


def _measure(settings: Settings, *, stay: bool) -> int:
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
        database.check_revision()
        ensure_topics(settings.kafka, settings.tasks)
        producer = Producer(settings.kafka, client_id="alphaloop-scheduler")
        try:
            metrics, clock = SchedulerMetrics(), DatabaseClock(database)
            if not stay:
                _scheduler(settings, database, producer, metrics, MANUAL_SCHEDULE_ID).run_once(clock.measure())
                return 0

            def lead(term: Term) -> Scheduler:
                return _scheduler(settings, database.guarded(term.check), producer, metrics, SCHEDULE_ID)

            lock: LeaderLock = AdvisoryLock(settings.postgres.url, connect_timeout_s=timeout_s)
            if not database.keeps_sessions:
                lock = LeaderLease(database, _owner(), lease_s=_LEASE_CHECKS * settings.scheduler.leader_check_s)
            return _stay(settings, lead, metrics, clock, lock)
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
        schedule_id=schedule_id,
    )


def _stay(
    settings: Settings,
    lead: Callable[[Term], Scheduler],
    metrics: SchedulerMetrics,
    clock: DatabaseClock,
    lock: LeaderLock,
) -> int:
    """Lead or stand by until SIGTERM or SIGINT; returns 1 when the Kafka client died, so that a supervisor restarts.

    Each time that this process becomes the leader, `lead` makes the scheduler of that term.
    """
    stop, died = threading.Event(), threading.Event()
    dials = settings.scheduler
    ticker: Ticker | None = None
    liveness = Liveness()
    checks = liveness.watch(Pulse("the check of the leader's lock"), MAX_CHECK_AGE_S + dials.leader_check_s)
    runs = liveness.watch(Pulse("the measurement run"), dials.max_run_s)
    longest_pause_s = dials.interval_s + dials.misfire_grace_s + dials.max_run_s
    ticks = liveness.watch(Pulse("the timer of measurement runs"), longest_pause_s)

    def fatal() -> None:
        died.set()
        stop.set()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)

    def promote(term: Term) -> None:
        nonlocal ticker
        metrics.set_leader(True)
        ticker = Ticker(
            lead(term).run_once,
            interval_s=dials.interval_s,
            misfire_grace_s=dials.misfire_grace_s,
            clock=clock.measure,
            metrics=metrics,
            fatal=fatal,
            run_pulse=runs,
            tick_pulse=ticks,
        )
        ticker.start()

    def demote() -> None:
        metrics.set_leader(False)
        # A requested stop finishes the run under way first. A lost lock does not wait for it: whatever it still tries
        # to write is refused, since its term has ended.
        if ticker is not None:
            ticker.stop(wait=stop.is_set())

    leadership = Leadership(lock, promote=promote, demote=demote)

    # A standby is as ready as a leader: both wait for the next tick.
    endpoint = Endpoint(
        dials.http_host,
        dials.http_port,
        metrics.registry,
        healthy=liveness.hung,
        ready=liveness.hung,
        username=dials.metrics_username,
        password=dials.metrics_password,
    )
    watchdog = Watchdog(liveness)
    watchdog.start()
    log.info("measuring", extra={"action": "scheduler_ready", "metrics": endpoint.url})
    try:
        with checks.expected():
            while not stop.is_set():
                checks.beat()
                leadership.check()
                stop.wait(dials.leader_check_s)
    finally:
        watchdog.close()
        stop.set()
        leadership.resign()
        endpoint.close()
    log.info("stopped", extra={"action": "scheduler_stopped"})
    return ExitCode.FAILED if died.is_set() else ExitCode.STOPPED


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
