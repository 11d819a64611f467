"""Retention: how long each kind of row and file is kept, and what keeps rows longer than the settings say."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from alphaloop.claim_check.store import ContentStore, drop_prompts
from alphaloop.errors import BrokerError, ContentError
from alphaloop.settings import SchedulerSettings
from alphaloop.store.housekeeping import Dropped, RetentionStore
from alphaloop.store.task_memory import FORGOTTEN_KEPT_FOR, ResultMemoryStore
from scheduler.report.pages import drop_reports

log = logging.getLogger(__name__)


#: Jobs outlive the messages that are made from the same topics by at least this.
MARGIN: Final = timedelta(days=1)
#: The age at which hourly sums go; the daily ones stay.
HOURLY_KEPT_FOR: Final = timedelta(days=400)
#: The age at which daily sums, closed drift events and incidents go.
DAILY_KEPT_FOR: Final = timedelta(days=1825)
#: The age at which rows of the audit go.
AUDIT_KEPT_FOR: Final = timedelta(days=400)
#: The most seconds that a run spends on deleting.
MOST_S: Final = 120.0
#: How long a message of a jobs topic may still be read; None: without limit. Raises BrokerError.
MessageRetention = Callable[[], timedelta | None]


@dataclass(frozen=True, slots=True)
class Retention:
    """Deletes what is too old, for at most MOST_S a run; the next run goes on."""

    store: RetentionStore
    memory: ResultMemoryStore
    settings: SchedulerSettings
    report_folder: Path
    message_retention: MessageRetention
    contents: ContentStore | None = None  #: of texts and prompts outside Kafka and Postgres
    clock: Callable[[], float] = time.monotonic

    def keep(self, now: datetime) -> None:
        """Delete rows and report files. Raises StoreError, and ConfigError for a folder that cannot be written."""
        until = self.clock() + MOST_S

        def time_is_up() -> bool:
            return self.clock() >= until

        def drop(before: datetime, *tables: str) -> None:
            for table in tables:
                _tell(table, self.store.drop(table, before, time_is_up))

        history = now - timedelta(days=self.settings.history_retention_days)
        drop_reports(self.report_folder, history)
        drop(history, "decisions", "expectation_pairs", "probe_runs", "probe_texts", "schedule_runs", "reports")
        drop(history, "api_batches")
        drop(now - HOURLY_KEPT_FOR, "acceptance_hourly")
        drop(now - DAILY_KEPT_FOR, "acceptance_daily", "drift_events", "incidents", "notifications")
        drop(now - AUDIT_KEPT_FOR, "audit")
        # A result is searched no longer than it may be read.
        forgotten = self.memory.forget_before(now - timedelta(days=self.settings.jobs_retention_days))
        _tell("remembered_results", Dropped(forgotten, is_all=True))
        self.memory.delete_forgotten(now - FORGOTTEN_KEPT_FOR)
        ended = self._jobs_before(now)
        if ended is not None:
            drop(ended, "cancellations", "redrives")
            _tell("jobs", self.store.drop_jobs(ended, time_is_up))
            # A dead letter that was sent again refers to the prompt of the first message, and is kept as long anew.
            self._drop_contents(ended, ended - (now - ended), time_is_up)

    def _drop_contents(self, texts_before: datetime, prompts_before: datetime, time_is_up: Callable[[], bool]) -> None:
        """Delete what lies in the store of contents; a store that is away only postpones that."""
        if self.contents is None:
            return
        try:
            _tell("stored_texts", self.store.drop_texts(texts_before, time_is_up, self.contents.delete))
            _tell("bodies", Dropped(*drop_prompts(self.contents, prompts_before, time_is_up)))
        except ContentError as error:
            told = {"action": "retention_postponed", "code": error.code, "hint": error.hint or ""}
            log.warning("texts and prompts were not deleted: %s", error.message, extra=told)

    def _jobs_before(self, now: datetime) -> datetime | None:
        """Before when jobs must have ended to be deleted; None: no job may be deleted.

        A row of `jobs` tells a redelivery from a new job, so it must outlive every message that may be read again.
        """
        wanted = timedelta(days=self.settings.jobs_retention_days)
        try:
            readable = self.message_retention()
        except BrokerError as error:
            postponed = {"action": "retention_postponed", "code": error.code}
            log.warning("no job deleted: %s", error.message, extra=postponed)
            return None
        if readable is None:
            postponed = {"action": "retention_postponed", "hint": "set retention.ms on every jobs topic"}
            log.warning("no job deleted: a jobs topic keeps its messages without limit", extra=postponed)
            return None
        if (least := readable + MARGIN) > wanted:
            told = "jobs are kept for %s instead of %s, because their topics keep messages so long"
            log.warning(told, least, wanted, extra={"action": "retention_extended"})
        return now - max(wanted, least)


def _tell(table: str, dropped: Dropped) -> None:
    if dropped.num_rows or not dropped.is_all:
        told = {"action": "retention", "table": table, "num_rows": dropped.num_rows, "is_all": dropped.is_all}
        log.info("deleted %d of %s", dropped.num_rows, table, extra=told)
