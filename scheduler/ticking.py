"""Calls the run at every interval, while this process leads: APScheduler, in memory, UTC."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from alphaloop.errors import AlphaloopError, FatalBrokerError
from alphaloop.liveness import Pulse
from scheduler.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Ticker:
    """Runs `run(now, scheduled_for)` at once and then at every multiple of the interval since 1970, UTC.

    Every leader computes the same times, so the next leader does not repeat a claimed run. Waiting ticks are merged
    into one; a tick later than the grace is dropped and counted. `fatal` is called when the process cannot go on.
    """

    def __init__(
        self,
        run: Callable[[datetime, datetime], object],
        *,
        interval_s: float,
        misfire_grace_s: int,
        clock: Callable[[], datetime],
        metrics: SchedulerMetrics,
        fatal: Callable[[], None],
        run_pulse: Pulse | None = None,
        tick_pulse: Pulse | None = None,
    ) -> None:
        self._run, self._clock, self._metrics, self._fatal = run, clock, metrics, fatal
        self._interval_s, self._misfire_grace_s = interval_s, misfire_grace_s
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
        every = AlignedInterval(seconds=self._interval_s, start_date=EPOCH, timezone=UTC)
        self._tick_pulse.beat()
        self._scheduler.add_job(self.tick, every, id="interval", next_run_time=datetime.now(UTC))
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
            now = self._clock()
            with self._run_pulse.expected():
                self._run(now, due_at(now, self._interval_s))
        except FatalBrokerError as error:
            log.error("%s", error.message, extra={"action": "run_failed", "code": error.code})
            self._fatal()
        except AlphaloopError as error:
            log.error("%s", error.message, extra={"action": "run_failed", "code": error.code, "hint": error.hint or ""})

    def _heard(self, event: JobExecutionEvent) -> None:
        if event.code == EVENT_JOB_ERROR:
            log.error("%s", type(event.exception).__name__, extra={"action": "run_crashed"})
        else:
            log.warning("a tick came too late, or while a run was under way", extra={"action": "tick_missed"})
            self._metrics.tick_missed()
            if self.is_running:
                self._tick_pulse.beat()


class AlignedInterval(IntervalTrigger):  # type: ignore[misc]
    """Multiples of the interval since the start date, also after a run at another time.

    The trigger never ends, because APScheduler 3.11.3 may fail at shutdown on a job whose trigger has ended.
    """

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """The first multiple from `now` on, and after `previous_fire_time`."""
        following: datetime = super().get_next_fire_time(None, now)
        is_repeat = previous_fire_time is not None and following <= previous_fire_time
        return following + self.interval if is_repeat else following


def due_at(now: datetime, interval_s: float) -> datetime:
    """The last multiple of the interval since 1970 that is not after `now`, to the microsecond."""
    since = (now - EPOCH).total_seconds()
    return datetime.fromtimestamp(since // interval_s * interval_s, UTC)
