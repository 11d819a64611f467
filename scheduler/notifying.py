"""Tells people what happened, while this process leads: every new state of drift, incidents, and reports if asked for.

At least once: an attempt is counted before it is made, so a process that dies in one leaves it to the next leader, and
what the service had already taken then comes twice. Two leaders do not tell the same: the attempt of one is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from alphaloop.errors import AlphaloopError, NotificationFailed, reason_of
from alphaloop.notifying import NewsKind, Sink
from alphaloop.settings import SchedulerSettings
from alphaloop.store.database import Database
from alphaloop.store.reports import NotificationStore, Pending
from scheduler.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

_ALWAYS: Final = (NewsKind.DRIFT, NewsKind.INCIDENT_OPENED, NewsKind.INCIDENT_CLOSED)
#: A notification that was not taken is sent again after each of these, and then no more.
RETRY_DELAYS_S: Final = (60, 300, 1800, 7200, 21_600)
_LONGEST_STOP_S: Final = 10.0


class Notifier:
    """Sends what was not sent, with bounded retries."""

    def __init__(
        self,
        database: Database,
        sinks: Sequence[Sink],
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        *,
        delays_s: Sequence[int] = RETRY_DELAYS_S,
    ) -> None:
        """`database` refuses a process that does not lead any more."""
        self._store, self._sinks, self._metrics = NotificationStore(database), sinks, metrics
        self._delays = [timedelta(seconds=delay) for delay in delays_s]
        self._reports = settings.notify_reports
        for sink in sinks:
            metrics.know_sink(sink.name)

    def add_sinks(self, now: datetime) -> None:
        """Begin to tell sinks that are new; what happened before is no news to them. Raises StoreError."""
        self._store.add_sinks((sink.name for sink in self._sinks), now)

    def send_due(self, now: datetime) -> int:
        """Send everything that is due; returns how many the sinks took. Raises StoreError.

        A sink that fails gets nothing more in this call.
        """
        self.add_sinks(now)
        return sum(self._send_to(sink, now) for sink in self._sinks)

    def _send_to(self, sink: Sink, now: datetime) -> int:
        num_sent = 0
        kinds = _ALWAYS if self._reports == "never" else (*_ALWAYS, NewsKind.REPORT)
        for pending in self._store.pending(sink.name, kinds, now):
            if not self._is_due(pending, now) or not self._store.begin(sink.name, pending, now):
                continue
            if not self._send(sink, pending, now):
                break
            num_sent += 1
        return num_sent

    def _is_due(self, pending: Pending, now: datetime) -> bool:
        if pending.news.kind is NewsKind.REPORT and self._reports == "changed" and not pending.news.is_change:
            return False
        if pending.attempted_at is None:
            return True
        if pending.num_attempts > len(self._delays):
            return False
        return now - pending.attempted_at >= self._delays[pending.num_attempts - 1]

    def _send(self, sink: Sink, pending: Pending, now: datetime) -> bool:
        news, num_attempts = pending.news, pending.num_attempts + 1
        try:
            sink.send(news.message)
        except NotificationFailed as error:
            is_last = num_attempts > len(self._delays)
            self._store.end(sink.name, news, now, failure=error.message)
            self._metrics.notification_failed(sink.name, is_last=is_last)
            facts = {"action": "notification_failed", "kind": news.kind.value, "id": news.source_id}
            log.log(
                logging.ERROR if is_last else logging.WARNING,
                "%s",
                error.message,
                extra={**facts, "attempt": num_attempts, "given_up": is_last, "code": error.code},
            )
            return False
        self._store.end(sink.name, news, now)
        self._metrics.notification_sent(sink.name)
        return True


class NotifyingThread:
    """Calls `send_due` again and again beside the runs, so that a slow service delays nothing. No failure ends it."""

    def __init__(self, notifier: Notifier, clock: Callable[[], datetime], check_s: float) -> None:
        self._notifier, self._clock, self._check_s = notifier, clock, check_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifying", daemon=True)

    def start(self) -> None:
        """Begin. What is recorded from now on is news."""
        self._try(lambda: self._notifier.add_sinks(self._clock()))
        self._thread.start()

    def stop(self, *, wait: bool) -> None:
        """Begin no more attempts; with `wait`, wait some seconds for the one under way."""
        self._stop.set()
        if wait:
            self._thread.join(_LONGEST_STOP_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._try(lambda: self._notifier.send_due(self._clock()))
            self._stop.wait(self._check_s)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            code = error.code if isinstance(error, AlphaloopError) else type(error).__name__
            log.warning("%s", reason_of(error), extra={"action": "notifying_failed", "code": code})
