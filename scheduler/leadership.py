"""Leadership: of several schedulers only the one that holds the lease in Postgres measures; the others stand by.

`stay` is the process: it waits for its servers, then leads or stands by until it is asked to stop.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from alphaloop.console.app import ConsoleServer
from alphaloop.errors import ConfigError, StoreError
from alphaloop.kafka.backlog import unfinished
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.liveness import ExitCode, Liveness, MetricsServer, Pulse, Watchdog
from alphaloop.notifying import Sink
from alphaloop.settings import SchedulerSettings, Settings, TasksFile
from alphaloop.start_wait import StartStopped, StartWait, await_servers
from alphaloop.store.coordination import LeaderLease, Term
from alphaloop.store.database import Database, DatabaseClock
from scheduler.beside import Beside
from scheduler.lacks import Foreseeing
from scheduler.loop import Scheduler
from scheduler.metrics import KafkaLag, SchedulerMetrics
from scheduler.notifying import Notifier
from scheduler.timetable import MISFIRE_GRACE_S, Ticker, timetable

log = logging.getLogger(__name__)

#: Between two attempts to become, or to stay, the leader.
CHECK_S: Final = 5.0
#: A leader may miss five checks before another process leads: on a busy machine one stands still for seconds.
LEASE_S: Final = 6 * CHECK_S
MAX_CHECK_AGE_S: Final = 60.0
#: A longer measurement run hangs: the process ends, and another one leads.
MAX_RUN_S: Final = 1800.0
#: Between two looks for news.
NOTIFY_CHECK_S: Final = 10.0
#: Between two looks ahead: at least this long, and this multiple of the time that a look takes.
FORESEE_CHECK_S: Final = 60.0
_PAUSE_OVER_FORESEEING: Final = 10.0


def stay(
    settings: Settings,
    tasks_file: TasksFile,
    database: Database,
    lease: LeaderLease,
    owner: str,
    sinks: Sequence[Sink],
) -> ExitCode:
    """Measure at every interval while leading, and notify `sinks`, until SIGTERM or SIGINT.

    Returns FAILED when the Kafka client died, so that a supervisor starts the process again. Raises the errors of
    await_servers.
    """
    stop, died = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    start_wait = StartWait(stop, settings.startup.server_wait_s)
    metrics, liveness, dials = SchedulerMetrics(), Liveness(), settings.scheduler
    with ExitStack() as exits:
        # A standby is as ready as a leader: both wait for the next tick.
        endpoint = MetricsServer(
            dials.http_host,
            dials.http_port,
            metrics.registry,
            healthy=liveness.hung,
            ready=lambda: start_wait.reason or liveness.hung(),
            password=dials.metrics_password,
        )
        exits.callback(endpoint.close)
        console = _console(settings, tasks_file, exits)
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
        watchdog = Watchdog(liveness)
        exits.callback(watchdog.close)
        watchdog.start()
        log.info("measuring", extra={"action": "scheduler_ready", "metrics": endpoint.url, "console": console})

        def parts(term: Term) -> TermParts:
            guarded = database.guarded(term.check)
            return TermParts(
                Scheduler(guarded, producer, settings, tasks_file, owner=owner, metrics=metrics),
                Foreseeing(guarded, settings, metrics, tasks_file),
                Notifier(guarded, sinks, dials, metrics) if sinks else None,
            )

        clock = DatabaseClock(database).measure
        _lead_in_turn(lease, parts, dials, clock=clock, stop=stop, died=died, liveness=liveness, metrics=metrics)
    log.info("stopped", extra={"action": "scheduler_stopped"})
    return ExitCode.FAILED if died.is_set() else ExitCode.STOPPED


def _console(settings: Settings, tasks_file: TasksFile, exits: ExitStack) -> str:
    """Serve the console until `exits` ends; returns its address, `-` where it is off or cannot listen."""
    if not settings.console.is_on:
        return "-"
    try:
        return exits.enter_context(closing(ConsoleServer(settings, tasks_file))).url
    except ConfigError as error:
        # Measuring goes on without it: another scheduler of this machine may serve it already.
        log.warning("no console: %s", error.message, extra={"action": "console_not_served", "hint": error.hint or ""})
        return "-"


@dataclass(frozen=True, slots=True)
class TermParts:
    """What works for one term of leadership."""

    scheduler: Scheduler
    foreseeing: Foreseeing
    notifier: Notifier | None


def _lead_in_turn(
    lease: LeaderLease,
    parts: Callable[[Term], TermParts],
    dials: SchedulerSettings,
    *,
    clock: Callable[[], datetime],
    stop: threading.Event,
    died: threading.Event,
    liveness: Liveness,
    metrics: SchedulerMetrics,
) -> None:
    """Lead whenever the lease is free, until `stop`, or until the Kafka client has `died`.

    `parts` makes what works in a term in which this process leads.
    """
    running: list[Beside | Ticker] = []
    checks = liveness.watch(Pulse("the check of the leader's lease"), MAX_CHECK_AGE_S + CHECK_S)
    runs = liveness.watch(Pulse("the measurement run"), MAX_RUN_S)
    table = timetable(dials)
    pause_s = table.longest_pause_s(clock())
    metrics.set_longest_pause(pause_s)
    ticks = liveness.watch(Pulse("the timer of measurement runs"), pause_s + MISFIRE_GRACE_S + MAX_RUN_S)

    def fatal() -> None:
        died.set()
        stop.set()

    def promote(term: Term) -> None:
        metrics.set_leader(True)
        made = parts(term)
        if (notifier := made.notifier) is not None:
            # Before the first run, so that what it finds counts as new.
            running.append(
                Beside(
                    "notifying",
                    lambda: notifier.send_due(clock()),
                    NOTIFY_CHECK_S,
                    first=lambda: notifier.add_sinks(clock()),
                )
            )
        running.append(
            Beside(
                "foreseeing",
                lambda: made.foreseeing.look(clock()),
                FORESEE_CHECK_S,
                pause_over_work=_PAUSE_OVER_FORESEEING,
            )
        )
        ticker = Ticker(
            made.scheduler.run_once,
            table=table,
            clock=clock,
            metrics=metrics,
            fatal=fatal,
            run_pulse=runs,
            tick_pulse=ticks,
        )
        running.append(ticker)
        for part in running:
            part.start()

    def demote() -> None:
        metrics.set_leader(False)
        # A requested stop finishes the run under way first. A lost lease does not wait for it: whatever it still tries
        # to write is refused, since its term has ended.
        while running:
            running.pop().stop(wait=stop.is_set())

    leadership = Leadership(lease, promote=promote, demote=demote)
    try:
        with checks.expected():
            while not stop.is_set():
                checks.beat()
                leadership.check()
                stop.wait(CHECK_S)
    finally:
        stop.set()
        leadership.resign()


class Leadership:
    """Takes the lease when it is free, and detects its loss. One thread uses it.

    `promote` is called after the lease was taken, with the term in which this process leads; `demote` after it was
    found lost or given up.
    """

    def __init__(
        self, lease: LeaderLease, promote: Callable[[Term], None], demote: Callable[[], None], check_s: float = CHECK_S
    ) -> None:
        """`check_s`: between two renewals of the lease while this process stops leading."""
        self._lease, self._promote, self._demote, self._check_s = lease, promote, demote, check_s
        self.leads = False  #: at the last check

    def check(self) -> bool:
        """Ask the database once, and act on a change; returns whether this process leads.

        A database that does not answer is a lost lease.
        """
        if not self.leads:
            if (term := self._try()) is not None:
                self.leads = True
                log.info("leading", extra={"action": "leader_elected", "term": term.number})
                self._promote(term)
        elif not self._lease.is_held():
            self.leads = False
            log.warning("lost the leader's lease", extra={"action": "leader_lost"})
            self._demote()
        return self.leads

    def resign(self) -> None:
        """Stop leading, then give the lease up, so that another process starts only after this one has stopped.

        To stop takes as long as the run under way. The lease is renewed meanwhile, else that run could not be recorded.
        """
        if self.leads:
            self.leads = False
            stopping = threading.Thread(target=self._demote, name="resigning")
            stopping.start()
            while stopping.is_alive():
                stopping.join(self._check_s)
                self._lease.is_held()
        self._lease.release()

    def _try(self) -> Term | None:
        try:
            return self._lease.begin_term() if self._lease.try_acquire() else None
        except StoreError as error:
            log.warning("%s", error.message, extra={"action": "leader_check_failed", "code": error.code})
            return None
