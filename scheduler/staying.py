"""A scheduler that stays: it waits for its servers, then leads or stands by until it is asked to stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Final

from alphaloop.console.server import ConsoleServer
from alphaloop.endpoint import Endpoint
from alphaloop.errors import ConfigError
from alphaloop.exit_codes import ExitCode
from alphaloop.kafka.backlog import unfinished
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.liveness import Liveness, Pulse
from alphaloop.settings import SchedulerSettings, Settings
from alphaloop.start_wait import StartStopped, StartWait
from alphaloop.starting import await_servers
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.terms import Term
from alphaloop.watchdog import Watchdog
from scheduler.leadership import LeaderLock, Leadership
from scheduler.loop import Scheduler
from scheduler.metrics import KafkaLag, SchedulerMetrics
from scheduler.notifying import Notifier, NotifyingThread
from scheduler.ticking import Ticker
from scheduler.timetable import timetable

log = logging.getLogger("scheduler")

MAX_CHECK_AGE_S: Final = 60.0


def stay(
    settings: Settings,
    database: Database,
    lock: LeaderLock,
    lead: Callable[[Term, Producer, SchedulerMetrics], Scheduler],
    notify: Callable[[Term, SchedulerMetrics], Notifier] | None,
) -> ExitCode:
    """Measure at every interval while leading, until SIGTERM or SIGINT.

    Each time that this process becomes the leader, `lead` and `notify` make the scheduler and the notifier of that
    term; `notify` is None where nobody is to be told. Returns FAILED when the
    Kafka client died, so that a supervisor starts the process again. Raises the errors of await_servers.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    start_wait = StartWait(stop, settings.startup.server_wait_s)
    metrics, liveness, dials = SchedulerMetrics(), Liveness(), settings.scheduler
    with ExitStack() as exits:
        # A standby is as ready as a leader: both wait for the next tick.
        endpoint = Endpoint(
            dials.http_host,
            dials.http_port,
            metrics.registry,
            healthy=liveness.hung,
            ready=lambda: start_wait.reason or liveness.hung(),
            username=dials.metrics_username,
            password=dials.metrics_password,
        )
        exits.callback(endpoint.close)
        console = _console(settings, exits)
        log.info("starting", extra={"action": "scheduler_starting", "metrics": endpoint.url, "console": console})
        try:
            await_servers(settings, database, start_wait)
        except StartStopped:
            log.info("stopped while it waited for a server", extra={"action": "scheduler_stopped"})
            return ExitCode.STOPPED
        ensure_topics(settings.kafka, settings.tasks)
        lag = KafkaLag(lambda: {task: left.num_messages for task, left in unfinished(settings.kafka).items()})
        exits.callback(lag.close)
        metrics.registry.register(lag)
        producer = Producer(settings.kafka, client_id="alphaloop-scheduler")
        exits.callback(producer.close)
        clock = DatabaseClock(database)
        watchdog = Watchdog(liveness)
        exits.callback(watchdog.close)
        watchdog.start()
        log.info("measuring", extra={"action": "scheduler_ready", "metrics": endpoint.url, "console": console})
        died = _lead_in_turn(
            dials,
            stop,
            liveness,
            metrics,
            clock,
            lock,
            lambda term: lead(term, producer, metrics),
            None if notify is None else lambda term: notify(term, metrics),
        )
    log.info("stopped", extra={"action": "scheduler_stopped"})
    return ExitCode.FAILED if died else ExitCode.STOPPED


def _console(settings: Settings, exits: ExitStack) -> str:
    """Serve the console until `exits` ends; returns its address, `-` where it is off or cannot listen."""
    if not settings.console.is_on:
        return "-"
    try:
        return exits.enter_context(ConsoleServer(settings)).url
    except ConfigError as error:
        # Measuring goes on without it: another scheduler of this machine may serve it already.
        log.warning("no console: %s", error.message, extra={"action": "console_not_served", "hint": error.hint or ""})
        return "-"


def _lead_in_turn(
    dials: SchedulerSettings,
    stop: threading.Event,
    liveness: Liveness,
    metrics: SchedulerMetrics,
    clock: DatabaseClock,
    lock: LeaderLock,
    lead: Callable[[Term], Scheduler],
    notify: Callable[[Term], Notifier] | None,
) -> bool:
    """Lead whenever the lock is free, until `stop`; returns whether the Kafka client died."""
    died = threading.Event()
    ticker: Ticker | None = None
    notifying: NotifyingThread | None = None
    checks = liveness.watch(Pulse("the check of the leader's lock"), MAX_CHECK_AGE_S + dials.leader_check_s)
    runs = liveness.watch(Pulse("the measurement run"), dials.max_run_s)
    table = timetable(dials)
    pause_s = table.longest_pause_s(clock.measure())
    metrics.set_longest_pause(pause_s)
    longest_tick_s = pause_s + dials.misfire_grace_s + dials.max_run_s
    ticks = liveness.watch(Pulse("the timer of measurement runs"), longest_tick_s)

    def fatal() -> None:
        died.set()
        stop.set()

    def promote(term: Term) -> None:
        nonlocal ticker, notifying
        metrics.set_leader(True)
        if notify is not None:
            # Before the first run, so that what it finds is not older than what is told.
            notifying = NotifyingThread(notify(term), clock.measure, dials.notify_check_s)
            notifying.start()
        ticker = Ticker(
            lead(term).run_once,
            table=table,
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
        if notifying is not None:
            notifying.stop(wait=stop.is_set())

    leadership = Leadership(lock, promote=promote, demote=demote)
    try:
        with checks.expected():
            while not stop.is_set():
                checks.beat()
                leadership.check()
                stop.wait(dials.leader_check_s)
    finally:
        stop.set()
        leadership.resign()
    return died.is_set()
