"""Tells people what happened, while this process leads: drift, incidents, lacks, and if asked for reports and batches.

At least once: an attempt is counted before it is made, so a process that dies in one leaves it to the next leader, and
what the service had already taken then comes twice. Two leaders do not send the same: the attempt of one is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from alphaloop.errors import NotificationFailed
from alphaloop.notifying import NewsKind, Sink
from alphaloop.settings import SchedulerSettings
from alphaloop.store.database import Database
from alphaloop.store.reports import NotificationStore, Pending
from scheduler.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

_ALWAYS: Final = (
    NewsKind.DRIFT,
    NewsKind.INCIDENT_OPENED,
    NewsKind.INCIDENT_CLOSED,
    NewsKind.LACK_OPENED,
    NewsKind.LACK_CLOSED,
)
#: A notification that was not taken is sent again after each of these, and then no more.
RETRY_DELAYS_S: Final = (60, 300, 1800, 7200, 21_600)


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
        self._wanted = {NewsKind.REPORT: settings.notify_reports, NewsKind.BATCH_ENDED: settings.notify_batches}
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
        kinds = (*_ALWAYS, *(kind for kind, wanted in self._wanted.items() if wanted != "never"))
        for pending in self._store.pending(sink.name, kinds, now):
            if not self._is_due(pending, now) or not self._store.begin(sink.name, pending, now):
                continue
            if not self._send(sink, pending, now):
                break
            num_sent += 1
        return num_sent

    def _is_due(self, pending: Pending, now: datetime) -> bool:
        if not pending.news.is_change and self._wanted.get(pending.news.kind) != "always":
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
