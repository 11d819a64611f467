"""Makes the report of a run and puts it where people look: Postgres, the folder and the topic."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from alphaloop.kafka.topics import DRIFT_REPORTS
from alphaloop.settings import ReportSettings, SchedulerSettings
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.incidents import IncidentStore
from alphaloop.store.probes import MEASURED, ProbeStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.schedule import ScheduleStore
from alphaloop.store.switchback import ExpectationStore, SwitchbackStore
from alphaloop.store.task_figures import TaskFigures, begin_of
from alphaloop.store.traffic import TrafficStore
from alphaloop.store.workers import ServerIdentityStore
from alphaloop.switchback.task_speedup import TaskSpeedup
from scheduler.counts import Counts
from scheduler.facts import SentProbes, SettingInForce
from scheduler.flagging import Flagged
from scheduler.probing.sending import HEADERS, Sender
from scheduler.probing.watch import Watched
from scheduler.report import (
    Report,
    build_report,
    changes_between,
    render_index,
    render_page,
    render_text,
    write_index,
    write_report,
)
from scheduler.report.accounts import gaps, saved_device_s
from scheduler.report.cost import cost_line
from scheduler.report.data import TaskLine
from scheduler.report.expectation_lines import expectation_lines
from scheduler.report.index import MAX_ENTRIES
from scheduler.timetable import timetable

log = logging.getLogger(__name__)


class Reporter:
    """Makes and publishes reports."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        settings: SchedulerSettings,
        folder: Path,
        schedule_id: str,
        flush_timeout_s: float,
        prices: ReportSettings,
    ) -> None:
        self._prices, self._database = prices, database
        self._sender, self._folder = sender, folder
        self._schedule_id, self._flush_timeout_s = schedule_id, flush_timeout_s
        self._timetable = timetable(settings)
        self._drift, self._drafts = TrafficStore(database), DraftRegistry(database)
        self._events, self._incidents = DriftEventStore(database), IncidentStore(database)
        self._probes, self._schedule = ProbeStore(database), ScheduleStore(database)
        self._switchback, self._reports = SwitchbackStore(database), ReportStore(database)
        self._expectations, self._servers = ExpectationStore(database), ServerIdentityStore(database)

    def publish(
        self,
        counts: Counts,
        figures: Mapping[str, TaskFigures],
        choices: Mapping[str, SettingInForce],
        sent: SentProbes,
        watched: Watched,
        flagged: Flagged,
    ) -> tuple[Report, Path]:
        """The report of a run, and the page's path. Raises StoreError, BrokerError, ConfigError."""
        measured = self._switchback.shown(counts.now)
        report = build_report(
            counts,
            figures,
            choices,
            self._drafts.all(),
            self._events.open_events(),
            sent,
            measured,
            self._incidents.open_incidents(),
            watched,
            flagged,
        )
        now = counts.now
        report = report.model_copy(
            update={
                **self._accounts(now),
                "tasks": self._with_savings(report.tasks, measured, counts),
                "device_cost_per_hour": self._prices.device_cost_per_hour,
                "currency": self._prices.currency,
                "expectations": expectation_lines(self._expectations.shown(now)),
                "gaps": gaps(self._schedule.succeeded(counts.since, now), now, self._longest_pause(now)),
                "last_decoded_at": counts.last_decoded_at or self._drift.last_decoded_at(counts.now),
                "next_due": self._timetable.next_due(counts.now),
            }
        )
        before = self.last()
        if before is not None:
            states = self._events.states_since(before.created_at)
            closed = self._incidents.closed_since(before.created_at)
            servers = self._servers.changed_since(before.created_at)
            report = report.model_copy(update={"changes": changes_between(before, report, states, closed, servers)})
        return report, self._keep(report)

    def _accounts(self, now: datetime) -> dict[str, float]:
        before_day = begin_of(now) - timedelta.resolution
        return {
            "device_s": round(self._probes.device_s(before_day, now), 3),
            "probe_spent_device_s": round(self._probes.device_s(before_day, now, purposes=MEASURED), 3),
        }

    def _with_savings(
        self, tasks: Sequence[TaskLine], measured: Mapping[str, TaskSpeedup], counts: Counts
    ) -> tuple[TaskLine, ...]:
        before_day = begin_of(counts.now) - timedelta.resolution
        passes = self._drift.saved_passes(before_day, counts.now)
        spent = self._drift.spent(before_day, counts.now)
        lines = []
        for line in tasks:
            saved, its = saved_device_s(measured.get(line.task)), spent.get(line.task)
            update = {
                "saved_device_s": saved,
                "num_saved_passes": passes.get(line.task, 0),
                "cost": None if its is None else cost_line(its, saved, self._prices),
            }
            lines.append(line.model_copy(update=update))
        return tuple(lines)

    def _longest_pause(self, now: datetime) -> timedelta:
        """Longer than this is a gap: one run may be skipped, because another one took too long."""
        return 2 * timedelta(seconds=self._timetable.longest_pause_s(now))

    def last(self) -> Report | None:
        """The newest report; None before the first, and where another version of alphaloop wrote it otherwise."""
        stored = self._reports.latest()
        if stored is None:
            return None
        try:
            return Report.model_validate(stored.content)
        except ValidationError as error:
            log.warning(
                "the report of %s was made by another version and is not compared with: %d fields differ",
                stored.created_at,
                error.error_count(),
                extra={"action": "report_not_compared"},
            )
            return None

    def _keep(self, report: Report) -> Path:
        text, html = render_text(report), render_page(report)
        self._reports.save(
            StoredReport(
                report.created_at,
                report.covers_from,
                report.covers_to,
                report.headline,
                report.model_dump(mode="json"),
                text,
                html,
            )
        )
        page = write_report(self._folder, report, text, html)
        headings = self._reports.headings(MAX_ENTRIES)
        write_index(self._folder, lambda pages: render_index(headings, pages))
        self._sender.send(
            DRIFT_REPORTS, key=self._schedule_id.encode(), value=report.model_dump_json().encode(), headers=HEADERS
        )
        self._sender.flush(self._flush_timeout_s)
        return page
