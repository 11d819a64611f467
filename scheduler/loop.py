"""One measurement run, top to bottom: `Scheduler.run_once(now)`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from alphaloop.as_decoded import NextJob
from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import AlphaloopError, StoreError
from alphaloop.probing.planning import ProbePlanner
from alphaloop.settings import ReportSettings, SchedulerSettings, TaskSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.drift import DriftStore
from alphaloop.store.drift_events import DriftEventStore
from alphaloop.store.drift_memory import DriftMemoryStore
from alphaloop.store.incidents import IncidentStore, OpenIncident
from alphaloop.store.partitions import PartitionKeeper
from alphaloop.store.probe_texts import ProbeTextStore
from alphaloop.store.probes import ProbeStore
from alphaloop.store.retention import RetentionStore
from alphaloop.store.rollups import RollupStore
from alphaloop.store.schedule import ScheduleStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import TaskFigures, task_figures
from scheduler.causes.cause import Incident
from scheduler.causes.probe_history import probe_histories
from scheduler.counts import Counts
from scheduler.drift import watch_traffic
from scheduler.facts import SettingInForce
from scheduler.flagging import Flagger
from scheduler.housekeeping import Housekeeper
from scheduler.judging import About, Judged, judge
from scheduler.metrics import SchedulerMetrics
from scheduler.probing.sending import ProbeSender, Sender
from scheduler.probing.watch import ExactnessWatch
from scheduler.reporting import Reporter
from scheduler.retention import MessageRetention, Retention

log = logging.getLogger(__name__)

SCHEDULE_ID: Final = "measure"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What one run did."""

    scheduled_for: datetime
    claimed: bool  #: False: another process had this run, nothing was done
    num_jobs: int = 0
    num_events_opened: int = 0  #: reopened ones too
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


#: What a worker would decide of the next job of each task at a moment, by task.
NextJobs = Callable[[Sequence[TaskFigures], datetime], Mapping[str, NextJob]]


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
        contents: ContentStore | None = None,
        flush_timeout_s: float = 30.0,
        change_jobs: float,
        schedule_id: str = SCHEDULE_ID,
        prices: ReportSettings | None = None,
        next_jobs: NextJobs | None = None,
    ) -> None:
        """`tasks` are those that workers know; `change_jobs` is the policy's prior for the jobs between two changes.

        `next_jobs` decides as a worker would, by task; without it, choices are those of the log.

        `message_retention` asks the broker how long a message of a jobs topic may still be read. `contents`
        holds texts and prompts outside Postgres; None where no store is configured. Without `prices` no cost is shown.
        """
        self._settings, self._metrics = settings, metrics
        self._owner, self._schedule_id = owner, schedule_id
        self._schedule = ScheduleStore(database)
        self._drift, self._drafts, self._decisions = (
            DriftStore(database),
            DraftRegistry(database),
            DecisionLog(database),
        )
        self._probes = ProbeStore(database)
        self._switchback = SwitchbackStore(database)
        self._flagger = Flagger(database, settings)
        self._drift_memory, self._drift_events = DriftMemoryStore(database), DriftEventStore(database)
        self._incidents = IncidentStore(database)
        self._watch = ExactnessWatch(ProbeTextStore(database), self._incidents)
        self._housekeeper = Housekeeper(
            PartitionKeeper(database),
            RollupStore(database),
            self._probes,
            AcceptanceStateStore(database),
            Retention(RetentionStore(database), settings, report_folder, message_retention, contents),
            settings,
        )
        self._next_jobs, self._database = next_jobs, database
        self._reporter = Reporter(
            database, sender, settings, report_folder, schedule_id, flush_timeout_s, prices or ReportSettings()
        )
        self._probe_sender = ProbeSender(
            ProbePlanner(database, settings, tasks, change_jobs), self._probes, sender, settings, flush_timeout_s
        )

    def run_once(self, now: datetime, scheduled_for: datetime | None = None) -> RunSummary:
        """Run what was due at `scheduled_for` (`now`, if left out), with everything decoded until `now`.

        1. claim the run   2. housekeeping, speed-ups   3. read counts   4. compare texts of probes
        5. test for drift, name causes   6. set or clear flags   7. send due probes   8. report

        A run happens once: the second caller for the same time gets `claimed=False`. A failure is recorded with the
        run and raised (StoreError, BrokerError, ConfigError); the next run does the remaining work.
        """
        due = scheduled_for or now
        if not self._schedule.claim(self._schedule_id, due, self._owner, now):
            self._show_last()
            return RunSummary(due, claimed=False)
        try:
            with self._metrics.time_run():
                self._housekeeper.keep(now)
                self._switchback.refresh(now)
                counts = self._read_counts(now)
                figures = task_figures(self._database, now)
                choices = self._choices(counts, figures)
                watched = self._watch.compare_new(now)
                judged = self._judge(counts, self._incidents.open_incidents())
                flagged = self._flagger.flag(judged, choices, now)
                sent = self._probe_sender.send_due(schedule_id=self._schedule_id, scheduled_for=due, now=now)
                report, page = self._reporter.publish(counts, figures, choices, sent, watched, flagged)
        except Exception as error:
            self._metrics.run_failed()
            self._note_failure(due, error, now)
            raise
        summary = RunSummary(
            due,
            True,
            counts.num_jobs,
            flagged.num_opened,
            flagged.num_closed,
            len(report.drift),
            flagged.num_status_changes,
            sent.num_jobs,
            report.headline,
            page,
        )
        self._schedule.finish(self._schedule_id, due, summary.outcome(), now)
        self._metrics.run_succeeded(report, sent)
        log.info("%s", report.headline, extra={"action": "run_finished", "page": str(page), **_logged(summary)})
        return summary

    def _show_last(self) -> None:
        """Show in the metrics what the last run found: this process may lead since a moment ago."""
        report = self._reporter.last()
        if report is not None:
            self._metrics.show(report)

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
        return Counts(
            since,
            now,
            self._drift.streams(since, now),
            self._probes.results(probed_since),
            self._drift.num_jobs(since, now),
        )

    def _judge(self, counts: Counts, incidents: Sequence[OpenIncident]) -> dict[About, Judged]:
        margin = self._settings.alpha_margin
        accepted = self._drift_events.accepted_levels(counts.now)
        parents = {
            (d.drafter, d.draft_revision): d.parent_revision
            for d in self._drafts.all()
            if d.parent_revision is not None
        }
        return judge(
            watch_traffic(self._drift_memory, self._settings, counts.now, accepted),
            probe_histories(counts.probes, margin, parents),
            [Incident(i.opened_at, i.found.task, i.found.drafter, i.found.kind) for i in incidents],
            counts.in_use(),
            margin,
            accepted,
        )

    def _choices(self, counts: Counts, figures: Mapping[str, TaskFigures]) -> dict[str, SettingInForce]:
        """What the next job would do, by task; where nobody can say, the last choice logged or setting used."""
        found = {}
        for task in counts.tasks:
            used = counts.last_used(task)
            if used is not None:
                found[task] = used
            for change in self._decisions.latest(task, limit=1):
                made = change.after
                found[task] = SettingInForce(
                    made.mode, made.drafter, made.num_draft_tokens, change.reason, change.explanation
                )
        if self._next_jobs is not None:
            asked = [figures.get(task) or TaskFigures(task) for task in sorted({*counts.tasks, *figures})]
            for task, its in self._next_jobs(asked, counts.now).items():
                found[task] = SettingInForce(
                    its.mode, its.drafter, its.num_draft_tokens, its.reason, its.explanation, its.running
                )
        return found


def _logged(summary: RunSummary) -> dict[str, Any]:
    return {name: value for name, value in summary.outcome().items() if name.startswith("num_")}
