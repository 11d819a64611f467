"""When runs are due, and what calls them then: APScheduler, in memory.

At every interval, or by a cron expression; in UTC, the same times for every scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.cron import CronTrigger

from alphaloop.errors import AlphaloopError, ConfigError, FatalBrokerError
from alphaloop.liveness import Pulse
from alphaloop.settings import SchedulerSettings
from scheduler.metrics import SchedulerMetrics

#: A run that is later than this is skipped.
MISFIRE_GRACE_S: Final = 600
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ANY_DAY: Final = datetime(2026, 1, 1, tzinfo=UTC)
_INSTANT: Final = timedelta(microseconds=1)
#: How far back the last time of a cron expression is looked for; 29 February on a Monday comes every 28 years.
_SPANS: Final = tuple(timedelta(days=days) for days in (1 / 24, 1, 31, 366, 30 * 366))


@dataclass(frozen=True, slots=True)
class Timetable:
    """Due times, the same for every scheduler of a database."""

    due_at: Callable[[datetime], datetime]  #: the last due time that is not after a moment
    next_due: Callable[[datetime], datetime]  #: the first due time after a moment

    def longest_pause_s(self, now: datetime) -> float:
        """The longest time between two of the next hundred due times."""
        longest, due = 0.0, self.due_at(now)
        for _ in range(100):
            following = self.next_due(due)
            longest, due = max(longest, (following - due).total_seconds()), following
        return longest


def timetable(settings: SchedulerSettings) -> Timetable:
    """What the settings say. Raises ConfigError for a cron expression that is none, or has no time in 30 years."""
    if settings.cron is None:
        return every(settings.interval_s)
    return by_cron(settings.cron)


def every(interval_s: float) -> Timetable:
    """Every multiple of the interval since 1970, to the microsecond."""
    interval = max(timedelta(seconds=interval_s), _INSTANT)

    def due_at(now: datetime) -> datetime:
        return now - (now - EPOCH) % interval

    return Timetable(due_at, lambda after: due_at(after) + interval)


def by_cron(expression: str) -> Timetable:
    """The times of a cron expression of five fields. Weekdays have names: numbers mean other days to APScheduler."""
    if any(character.isdigit() for field in expression.split()[4:] for character in field):
        raise ConfigError(
            f"scheduler.cron: expected a weekday by its name, found {expression!r}", hint="write mon-fri instead of 1-5"
        )
    try:
        trigger = CronTrigger.from_crontab(expression, timezone=UTC)
    except ValueError as error:
        raise ConfigError(
            f"scheduler.cron: expected five fields, minute hour day month weekday, found {expression!r}: {error}",
            hint='"30 * * * *" is half past every hour',
        ) from None

    def next_due(after: datetime) -> datetime:
        due: datetime | None = trigger.get_next_fire_time(None, after + _INSTANT)
        if due is None:
            raise ConfigError(f"scheduler.cron: {expression!r} has no time after {after}")
        return due

    def due_at(now: datetime) -> datetime:
        for span in _SPANS:
            due = next_due(now - span)
            if due <= now:
                while (following := next_due(due)) <= now:
                    due = following
                return due
        raise ConfigError(f"scheduler.cron: {expression!r} names no time within 30 years")

    due_at(_ANY_DAY)  # raises where the expression names no time
    return Timetable(due_at, next_due)


class DueTimes(BaseTrigger):  # type: ignore[misc]
    """The due times of a timetable, for APScheduler. It never ends: 3.11.3 may fail at shutdown on one that has."""

    def __init__(self, table: Timetable) -> None:
        self._table = table

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """The first due time from `now` on, and after `previous_fire_time`."""
        due = self._table.due_at(now)
        while due < now or (previous_fire_time is not None and due <= previous_fire_time):
            due = self._table.next_due(due)
        return due


log = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticker:
    """Runs `run(now, scheduled_for)` at once and then as its timetable says.

    Every leader computes the same times, so the next leader does not repeat a claimed run. At once: what was missed
    while no process led is caught up once, by the last run that was due. So is what came due while a run went on. A
    tick later than the grace is dropped and counted. `fatal` is called when the process cannot go on.
    """

    run: Callable[[datetime, datetime], object]
    _: KW_ONLY
    table: Timetable
    clock: Callable[[], datetime]
    metrics: SchedulerMetrics
    fatal: Callable[[], None]
    #: Beats when a run begins.
    run_pulse: Pulse = field(default_factory=lambda: Pulse("the measurement run"))
    #: Beats at each tick.
    tick_pulse: Pulse = field(default_factory=lambda: Pulse("the timer of measurement runs"))
    _scheduler: BackgroundScheduler | None = field(default=None, init=False)

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
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": MISFIRE_GRACE_S},
        )
        self._scheduler.add_listener(self._heard, EVENT_JOB_ERROR | EVENT_JOB_MISSED | EVENT_JOB_MAX_INSTANCES)
        self.tick_pulse.beat()
        self._scheduler.add_job(self.tick, DueTimes(self.table), id="timetable", next_run_time=datetime.now(UTC))
        self._scheduler.start()

    def stop(self, *, wait: bool) -> None:
        """Stop ticking; with `wait`, wait for a run that is under way."""
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.shutdown(wait=wait)
            self.tick_pulse.rest()

    def tick(self) -> None:
        """Run what is due now. A run that fails is logged; the next tick tries again."""
        if self.is_running:
            self.tick_pulse.beat()
        try:
            due = self._run_due()
            if self.table.due_at(self.clock()) > due:
                self._run_due()
        except FatalBrokerError as error:
            log.error("%s", error.message, extra={"action": "run_failed", "code": error.code})
            self.fatal()
        except AlphaloopError as error:
            log.error("%s", error.message, extra={"action": "run_failed", "code": error.code, "hint": error.hint or ""})

    def _run_due(self) -> datetime:
        """Run what is due now; returns what that was."""
        now = self.clock()
        due = self.table.due_at(now)
        with self.run_pulse.expected():
            self.run(now, due)
        return due

    def _heard(self, event: JobExecutionEvent) -> None:
        if event.code == EVENT_JOB_ERROR:
            log.error("%s", type(event.exception).__name__, extra={"action": "run_crashed"})
        else:
            log.warning("a tick came too late, or while a run was under way", extra={"action": "tick_missed"})
            self.metrics.tick_missed()
            if self.is_running:
                self.tick_pulse.beat()
