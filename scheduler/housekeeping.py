"""Housekeeping: makes and drops partitions, sums up days, cleans up dead runs, deletes what is too old."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from alphaloop.errors import StoreBusy
from alphaloop.settings import SchedulerSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.partitions import PartitionKeeper, utc_day
from alphaloop.store.probes import ProbeStore
from alphaloop.store.rollups import RollupStore
from scheduler.retention import Retention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Housekeeper:
    """Runs first, so that no later step lacks a partition."""

    partitions: PartitionKeeper
    rollups: RollupStore
    probes: ProbeStore
    state: AcceptanceStateStore
    retention: Retention
    settings: SchedulerSettings

    def keep(self, now: datetime) -> None:
        """One round of housekeeping; every step can be repeated."""
        oldest = now - timedelta(days=self.settings.history_retention_days)
        self.partitions.ensure(now, self.settings.partitions_ahead_days)
        # Before retention, which deletes hours.
        self.rollups.roll_up(now)
        self.probes.settle_unsent(now - timedelta(seconds=self.settings.probe_deadline_s))
        self.state.drop_before(oldest)
        # Behind `state.drop_before`, because choices of forgotten targets go too.
        self.retention.keep(now)
        try:
            self.partitions.drop_before(utc_day(oldest))
        except StoreBusy as error:
            # A long query holds the table: the next run drops the partition.
            log.warning("%s", error.message, extra={"action": "retention_postponed", "code": error.code})
