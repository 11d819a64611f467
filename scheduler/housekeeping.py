"""Housekeeping of the database: makes and drops partitions, sums up days, cleans up dead runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from alphaloop.errors import StoreBusy
from alphaloop.settings import SchedulerSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.checkpoints import CheckpointStore
from alphaloop.store.partitions import PartitionKeeper, utc_day
from alphaloop.store.probes import ProbeStore
from alphaloop.store.reports import ReportStore
from alphaloop.store.rollups import RollupStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Housekeeper:
    """Runs first, so that no later step lacks a partition."""

    partitions: PartitionKeeper
    rollups: RollupStore
    probes: ProbeStore
    reports: ReportStore
    state: AcceptanceStateStore
    checkpoints: CheckpointStore
    settings: SchedulerSettings

    def keep(self, now: datetime) -> None:
        """One round of housekeeping; every step can be repeated."""
        oldest = now - timedelta(days=self.settings.history_retention_days)
        self.partitions.ensure(now, self.settings.partitions_ahead_days)
        # Yesterday's last hours arrive after midnight.
        for day in (utc_day(now - timedelta(days=1)), utc_day(now)):
            self.rollups.roll_up_day(day)
        self.probes.settle_unsent(now - timedelta(seconds=self.settings.probe_deadline_s))
        self.reports.drop_before(oldest)
        self.checkpoints.take(now)
        self.state.drop_before(oldest)
        self.checkpoints.drop_before(oldest)
        try:
            self.partitions.drop_before(utc_day(oldest))
        except StoreBusy as error:
            # A long query holds the table: the next run drops the partition.
            log.warning("%s", error.message, extra={"action": "retention_postponed", "code": error.code})
