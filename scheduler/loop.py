"""One measurement run, top to bottom: `Scheduler.run_once(now)`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from alphaloop.errors import AlphaloopError, StoreError
from alphaloop.kafka.topics import DRIFT_REPORTS
from alphaloop.probing.planning import ProbePlanner
from alphaloop.settings import SchedulerSettings, TaskSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.checkpoints import CheckpointStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry, DraftRevision, DraftStatus
from alphaloop.store.drift import DriftStore, OpenEvent
from alphaloop.store.incidents import IncidentStore
from alphaloop.store.partitions import PartitionKeeper
from alphaloop.store.probe_texts import ProbeTextStore
from alphaloop.store.probes import ProbeStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.retention import RetentionStore
from alphaloop.store.rollups import RollupStore
from alphaloop.store.schedule import ScheduleStore
from alphaloop.store.switchback import SwitchbackStore
from scheduler.counts import Counts
from scheduler.facts import SentProbes, SettingInForce
from scheduler.flags import Verdicts, events_to_close, judge, status_changes
from scheduler.housekeeping import Housekeeper
from scheduler.metrics import SchedulerMetrics
from scheduler.probing.sending import HEADERS, ProbeSender, Sender
from scheduler.probing.watch import ExactnessWatch, Watched
from scheduler.report import Report, build_report, render_page, render_text, write_report
from scheduler.retention import MessageRetention, Retention

log = logging.getLogger(__name__)

SCHEDULE_ID: Final = "measure"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What one run did."""

    scheduled_for: datetime
    claimed: bool  #: False: another process had this run, nothing was done
    num_jobs: int = 0
    num_events_opened: int = 0
    num_events_closed: int = 0
    num_events_open: int = 0
    num_status_changes: int = 0
    num_probes_sent: int = 0  #: probes and their controls
    headline: str = ""
    page: Path | None = None

    def outcome(self) -> dict[str, Any]:
        """The counts that schedule_runs stores."""
        kept = asdict(self)
        return {name: kept[name] for name in kept if name.startswith("num_") or name == "headline"}


class Scheduler:
    """Measures: reads the counts of decoded jobs, tests for drift, sends probes, reports. It never decodes."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        settings: SchedulerSettings,
        *,
        tasks: Mapping[str, TaskSettings],
        report_folder: Path,
        owner: str,
        metrics: SchedulerMetrics,
        message_retention: MessageRetention,
        flush_timeout_s: float = 30.0,
        change_jobs: float,
        schedule_id: str = SCHEDULE_ID,
    ) -> None:
        """`tasks` are those that workers know; `change_jobs` is the policy's prior for the jobs between two changes.

        `message_retention` asks the broker how long a message of a jobs topic may still be read.
        """
        self._settings, self._sender, self._metrics = settings, sender, metrics
        self._report_folder, self._owner, self._flush_timeout_s = report_folder, owner, flush_timeout_s
        self._schedule_id = schedule_id
        self._schedule = ScheduleStore(database)
        self._drift, self._drafts, self._decisions = (
            DriftStore(database),
            DraftRegistry(database),
            DecisionLog(database),
        )
        self._probes, self._reports = ProbeStore(database), ReportStore(database)
        self._switchback = SwitchbackStore(database)
        self._incidents = IncidentStore(database)
        self._watch = ExactnessWatch(ProbeTextStore(database), self._incidents)
        self._housekeeper = Housekeeper(
            PartitionKeeper(database),
            RollupStore(database),
            self._probes,
            AcceptanceStateStore(database),
            CheckpointStore(database),
            Retention(RetentionStore(database), settings, report_folder, message_retention),
            settings,
        )
        self._probe_sender = ProbeSender(
            ProbePlanner(database, settings, tasks, change_jobs), self._probes, sender, settings, flush_timeout_s
        )

    def run_once(self, now: datetime, scheduled_for: datetime | None = None) -> RunSummary:
        """Run what was due at `scheduled_for` (`now`, if left out), with everything decoded until `now`.

        1. claim the run   2. housekeeping, speed-ups   3. read counts   4. test for drift   5. set or clear flags
        6. compare texts of probes   7. send due probes   8. report

        A run happens once: the second caller for the same time gets `claimed=False`. A failure is recorded with the
        run and raised (StoreError, BrokerError, ConfigError); the next run does the remaining work.
        """
        due = scheduled_for or now
        if not self._schedule.claim(self._schedule_id, due, self._owner, now):
            return RunSummary(due, claimed=False)
        try:
            with self._metrics.time_run():
                self._housekeeper.keep(now)
                self._switchback.refresh(now)
                counts = self._read_counts(now)
                verdicts = judge(counts, self._drift.open_events(), self._settings)
                opened, closed, changed = self._flag(verdicts, now)
                choices = self._choices(counts)
                watched = self._watch.compare_new(now)
                sent = self._probe_sender.send_due(schedule_id=self._schedule_id, scheduled_for=due, now=now)
                report, page = self._report(counts, choices, sent, watched, opened=opened, closed=closed)
        except Exception as error:
            self._metrics.run_failed()
            self._note_failure(due, error, now)
            raise
        summary = RunSummary(
            due, True, counts.num_jobs, opened, closed, len(report.drift), changed, sent.num_jobs, report.headline, page
        )
        self._schedule.finish(self._schedule_id, due, summary.outcome(), now)
        self._metrics.run_succeeded(report, sent, now)
        log.info("%s", report.headline, extra={"action": "run_finished", "page": str(page), **_logged(summary)})
        return summary

    def _note_failure(self, due: datetime, error: Exception, now: datetime) -> None:
        outcome = {"error": type(error).__name__}
        if isinstance(error, AlphaloopError):
            outcome = {"error": error.code, "message": error.message}
        # The database may be what failed; the first error is the one to raise.
        with suppress(StoreError):
            self._schedule.finish(self._schedule_id, due, outcome, now)

    def _read_counts(self, now: datetime) -> Counts:
        since = now - timedelta(days=self._settings.drift_window_days)
        # A draft is compared with its first probes, which are older than the window.
        probed_since = now - timedelta(days=self._settings.history_retention_days)
        return Counts(since, now, self._drift.streams(since, now), self._probes.results(probed_since))

    def _flag(self, verdicts: Verdicts, now: datetime) -> tuple[int, int, int]:
        """Open and close events, set draft statuses; returns how many of each."""
        over = events_to_close(self._drift.open_events(), verdicts)
        self._drift.close([event.id for event in over], now)
        opened = sum(self._drift.open(f.subject, f.cause.value, f.verdict, f.evidence, now) for f in verdicts.findings)
        statuses = {(d.drafter, d.draft_revision, d.target_revision): d.status.value for d in self._drafts.all()}
        changes = status_changes(verdicts.comparisons, statuses, self._settings)
        for change in changes:
            self._drafts.set_status(
                change.drafter, change.draft_revision, change.target_revision, DraftStatus(change.status), change.reason
            )
        return opened, len(over), len(changes)

    def _choices(self, counts: Counts) -> dict[str, SettingInForce]:
        """The choice in force by task, from the log of decisions."""
        found = {}
        for task in counts.tasks:
            for change in self._decisions.latest(task, limit=1):
                made = change.after
                found[task] = SettingInForce(
                    made.mode, made.drafter, made.num_draft_tokens, change.reason, change.explanation
                )
        return found

    def _report(
        self,
        counts: Counts,
        choices: dict[str, SettingInForce],
        sent: SentProbes,
        watched: Watched,
        *,
        opened: int,
        closed: int,
    ) -> tuple[Report, Path]:
        """Write the report to Postgres, to the folder and to the topic."""
        drafts: Sequence[DraftRevision] = self._drafts.all()
        events: Sequence[OpenEvent] = self._drift.open_events()
        report = build_report(
            counts,
            choices,
            drafts,
            events,
            sent,
            self._switchback.shown(counts.now),
            self._incidents.open_incidents(),
            watched,
            opened=opened,
            closed=closed,
        )
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
        page = write_report(self._report_folder, report, text, html)
        self._sender.send(
            DRIFT_REPORTS, key=self._schedule_id.encode(), value=report.model_dump_json().encode(), headers=HEADERS
        )
        self._sender.flush(self._flush_timeout_s)
        return report, page


def _logged(summary: RunSummary) -> dict[str, Any]:
    return {name: value for name, value in summary.outcome().items() if name.startswith("num_")}
