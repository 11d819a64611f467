"""Calls the run when it is due, while this process leads: APScheduler, in memory, UTC."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from alphaloop.errors import AlphaloopError, FatalBrokerError
from alphaloop.liveness import Pulse
from scheduler.metrics import SchedulerMetrics
from scheduler.timetable import Beginnings, Timetable

log = logging.getLogger(__name__)


class Ticker:
    """Runs `run(now, scheduled_for)` at once and then as its timetable says.

    Every leader computes the same times, so the next leader does not repeat a claimed run. At once: what was missed
    while nobody led is caught up once, by the last run that was due. So is what came due while a run went on. A tick
    later than the grace is dropped and counted. `fatal` is called when the process cannot go on.
    """

    def __init__(
        self,
        run: Callable[[datetime, datetime], object],
        *,
        table: Timetable,
        misfire_grace_s: int,
        clock: Callable[[], datetime],
        metrics: SchedulerMetrics,
        fatal: Callable[[], None],
        run_pulse: Pulse | None = None,
        tick_pulse: Pulse | None = None,
    ) -> None:
        self._run, self._clock, self._metrics, self._fatal = run, clock, metrics, fatal
        self._table, self._misfire_grace_s = table, misfire_grace_s
        self._scheduler: BackgroundScheduler | None = None
        self._run_pulse = run_pulse or Pulse("the measurement run")  # beats when a run begins
        self._tick_pulse = tick_pulse or Pulse("the timer of measurement runs")  # beats at each tick

    @property
    def is_running(self) -> bool:
        """Whether ticks are due."""
        return self._scheduler is not None

    def start(self) -> None:
        """Begin ticking; does nothing when it ticks already."""
        if self._scheduler is not None:
            return
        # One thread, so that two runs never overlap.
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(max_workers=1)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": self._misfire_grace_s},
        )
        self._scheduler.add_listener(self._heard, EVENT_JOB_ERROR | EVENT_JOB_MISSED | EVENT_JOB_MAX_INSTANCES)
        self._tick_pulse.beat()
        self._scheduler.add_job(self.tick, Beginnings(self._table), id="timetable", next_run_time=datetime.now(UTC))
        self._scheduler.start()

    def stop(self, *, wait: bool) -> None:
        """Stop ticking; with `wait`, wait for a run that is under way."""
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.shutdown(wait=wait)
            self._tick_pulse.rest()

    def tick(self) -> None:
        """Run what is due now. A run that fails is logged; the next tick tries again."""
        if self.is_running:
            self._tick_pulse.beat()
        try:
            due = self._run_due()
            if self._table.due_at(self._clock()) > due:
                self._run_due()
        except FatalBrokerError as error:
            log.error("%s", error.message, extra={"action": "run_failed", "code": error.code})
            self._fatal()
        except AlphaloopError as error:
            log.error("%s", error.message, extra={"action": "run_failed", "code": error.code, "hint": error.hint or ""})

    def _run_due(self) -> datetime:
        """Run what is due now; returns what that was."""
        now = self._clock()
        due = self._table.due_at(now)
        with self._run_pulse.expected():
            self._run(now, due)
        return due

    def _heard(self, event: JobExecutionEvent) -> None:
        if event.code == EVENT_JOB_ERROR:
            log.error("%s", type(event.exception).__name__, extra={"action": "run_crashed"})
        else:
            log.warning("a tick came too late, or while a run was under way", extra={"action": "tick_missed"})
            self._metrics.tick_missed()
            if self.is_running:
                self._tick_pulse.beat()
