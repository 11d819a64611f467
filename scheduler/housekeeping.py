"""What keeps the database in shape: partitions ahead, old ones dropped, days rolled up, dead runs cleared."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from alphaloop.settings import SchedulerSettings
from alphaloop.store.partitions import PartitionKeeper, utc_day
from alphaloop.store.probes import ProbeStore
from alphaloop.store.reports import ReportStore
from alphaloop.store.rollups import RollupStore


@dataclass(frozen=True, slots=True)
class Housekeeper:
    """Runs first, so that nothing else waits for a missing partition."""

    partitions: PartitionKeeper
    rollups: RollupStore
    probes: ProbeStore
    reports: ReportStore
    settings: SchedulerSettings

    def keep(self, now: datetime) -> None:
        """One round of housekeeping; every step can be repeated."""
        oldest = now - timedelta(days=self.settings.history_retention_days)
        self.partitions.ensure(now, self.settings.partitions_ahead_days)
        # Yesterday's last hours arrive after midnight.
        for day in (utc_day(now - timedelta(days=1)), utc_day(now)):
            self.rollups.roll_up_day(day)
        self.probes.settle_unsent(now - timedelta(seconds=self.settings.probe_deadline_s))
        self.partitions.drop_before(utc_day(oldest))
        self.reports.drop_before(oldest)
