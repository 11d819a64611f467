"""One measurement run, top to bottom: `Scheduler.run_once(now)`. It reads and writes; the other modules compute.

It begins with housekeeping: `Retention`, at the end of this module, says how long each kind of row and file is kept,
and what keeps rows longer than the settings say.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from alphaloop.as_decoded import NextJob
from alphaloop.claim_check.store import ContentStore, drop_prompts
from alphaloop.errors import AlphaloopError, BrokerError, ConfigError, ContentError, StoreBusy, StoreError
from alphaloop.explaining.explanation import next_jobs
from alphaloop.explaining.refreshing import refresh_lines
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import DRIFT_REPORTS, longest_job_retention
from alphaloop.messages import encode_job, payload_digest
from alphaloop.messages.topics import jobs_topic
from alphaloop.probe_plan import DEADLINE, WINDOW, ProbePlanner
from alphaloop.settings import SchedulerSettings, Settings, TasksFile
from alphaloop.store.coordination import ScheduleStore
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import AcceptanceStateStore, DraftRegistry, DraftStatus
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drift import DriftEventStore, DriftMemoryStore, EventState, IncidentStore
from alphaloop.store.housekeeping import Dropped, RetentionStore, drop_days_before, ensure_ahead, utc_day
from alphaloop.store.job_counts import RollupStore
from alphaloop.store.lacks import LackStore
from alphaloop.store.probes import MEASURED, ProbeRun, ProbeStore
from alphaloop.store.refreshes import RefreshStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.spending import SpendingStore, SpentBy, total
from alphaloop.store.switchback import ExpectationStore, SwitchbackStore
from alphaloop.store.task_figures import TaskFigures, begin_of, task_figures, with_targets
from alphaloop.store.task_memory import FORGOTTEN_KEPT_FOR, ResultMemoryStore
from alphaloop.store.traffic import TrafficStore
from alphaloop.store.workers import ServerIdentityStore, WorkerStore, targets_by_revision
from scheduler.causes import About, DriftFinding, Judged, SeenIncident, judge
from scheduler.counts import RunCounts
from scheduler.drift.watching import watch_traffic
from scheduler.events import REOPENED_WITHIN, Draft, Flagged, TaskPace, event_changes, lost_tokens_per_s, status_changes
from scheduler.metrics import SchedulerMetrics
from scheduler.probe_history import probe_histories
from scheduler.probing import PlannedJob, SentProbes, Watched, compare_new, make_jobs
from scheduler.refreshing import due_refreshes, ended_trials, replaced_parents
from scheduler.report.build import REPORTED, RunFindings, build_report, expectation_lines, gaps
from scheduler.report.data import DriftReport
from scheduler.report.pages import (
    MAX_ENTRIES,
    drop_reports,
    render_index,
    render_page,
    render_text,
    write_index,
    write_report,
)
from scheduler.report.wording import changes_between
from scheduler.timetable import timetable

log = logging.getLogger(__name__)

SCHEDULE_ID: Final = "measure"
_HEADERS: Final = (("content-type", b"application/json"),)
_FLUSH_TIMEOUT_S: Final = 30.0
_DAY: Final = timedelta(days=1)
_DAYS_AHEAD: Final = 7  #: for which tables partitioned by day have partitions


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


class Scheduler:
    """Measures: reads the counts of decoded jobs, tests for drift, sends probes, reports. It never decodes."""

    def __init__(
        self,
        database: Database,
        producer: Producer,
        settings: Settings,
        tasks_file: TasksFile | None = None,
        *,
        owner: str,
        metrics: SchedulerMetrics,
        schedule_id: str = SCHEDULE_ID,
        message_retention: MessageRetention | None = None,
    ) -> None:
        """`database` refuses a process that does not lead any more. Without a `tasks_file` the tasks stay.

        `message_retention` says how long a message of a jobs topic may still be read; without it the broker is asked.
        """
        dials = settings.scheduler
        self._database, self._producer, self._settings, self._dials = database, producer, settings, dials
        self._tasks_file = tasks_file
        self._owner, self._metrics, self._schedule_id = owner, metrics, schedule_id
        self._timetable = timetable(dials)
        self._schedule, self._reports = ScheduleStore(database), ReportStore(database)
        self._rollups = RollupStore(database)
        self._state = AcceptanceStateStore(database)
        readable = message_retention or partial(longest_job_retention, settings.kafka)
        contents = ContentStore.of(settings.claim_check)
        self._retention = Retention(
            RetentionStore(database), ResultMemoryStore(database), dials, settings.report_folder, readable, contents
        )
        self._drift, self._drift_memory = TrafficStore(database), DriftMemoryStore(database)
        self._events, self._incidents = DriftEventStore(database), IncidentStore(database)
        self._drafts, self._decisions = DraftRegistry(database), DecisionLog(database)
        self._switchback, self._expectations = SwitchbackStore(database), ExpectationStore(database)
        self._probes, self._refreshes = ProbeStore(database), RefreshStore(database)
        self._servers, self._workers = ServerIdentityStore(database), WorkerStore(database)
        self._lacks = LackStore(database)
        self._spending = SpendingStore(database, settings.prices)

    def run_once(self, now: datetime, scheduled_for: datetime | None = None) -> RunSummary:
        """Run what was due at `scheduled_for` (`now`, if left out), with everything decoded until `now`.

        A run happens once: the second caller for the same time gets `claimed=False`. A failure is recorded with the
        run and raised (StoreError, BrokerError, ConfigError); the next run does the remaining work.
        """
        due = scheduled_for or now
        if not self._schedule.claim(self._schedule_id, due, self._owner, now):
            if (report := self._last_report()) is not None:  # this process may lead since a moment ago
                self._metrics.show(report)
            return RunSummary(due, claimed=False)
        try:
            with self._metrics.time_run():
                if self._tasks_file is not None:
                    self._settings = self._tasks_file.applied_to(self._settings)
                self._keep_house(now)
                self._switchback.refresh(now)
                counts = self._read_counts(now)
                figures = task_figures(self._database, now)
                with_targets(list(figures.values()), self._settings.bindings, self._workers.seen())
                choices = self._choices(counts, figures)
                watched = compare_new(self._probes, self._incidents, now)
                judged = self._judge(counts)
                flagged = self._flag(judged, choices, now)
                self._end_trials(choices, now)
                self._open_refreshes(now)
                sent = self._send_probes(due, now)
                report = self._make_report(counts, figures, choices, sent, watched, flagged)
                page = self._publish(report)
        except Exception as error:
            self._metrics.run_failed()
            self._note_failure(due, error, now)
            raise
        changed = flagged.num_opened, flagged.num_closed, len(report.drift), flagged.num_status_changes
        summary = RunSummary(due, True, counts.num_jobs, *changed, sent.num_jobs, report.headline, page)
        self._schedule.finish(self._schedule_id, due, summary.outcome(), now)
        self._metrics.run_succeeded(report, sent)
        numbers = {name: value for name, value in summary.outcome().items() if name.startswith("num_")}
        log.info("%s", report.headline, extra={"action": "run_finished", "page": str(page), **numbers})
        return summary

    def _keep_house(self, now: datetime) -> None:
        """Make and drop partitions, sum up days, clean up dead runs, delete what is too old.

        It comes first, so that no later step lacks a partition. Every step can be repeated.
        """
        oldest = now - timedelta(days=self._dials.history_retention_days)
        ensure_ahead(self._database, now, _DAYS_AHEAD)
        # Before retention, which deletes hours.
        self._rollups.roll_up(now)
        self._probes.settle_unsent(now - DEADLINE)
        self._state.drop_before(oldest)
        # After `state.drop_before`, because choices of forgotten targets go too.
        self._retention.keep(now)
        try:
            drop_days_before(self._database, utc_day(oldest))
        except StoreBusy as error:
            # A long query holds the table: the next run drops the partition.
            log.warning("%s", error.message, extra={"action": "retention_postponed", "code": error.code})

    def _read_counts(self, now: datetime) -> RunCounts:
        since = now - WINDOW
        # A draft is compared with its first probes, which are older than the window.
        probed_since = now - timedelta(days=self._dials.history_retention_days)
        streams, probes = self._drift.streams(since, now), self._probes.results(probed_since)
        return RunCounts(since, now, streams, probes, self._drift.num_jobs(since, now))

    def _choices(self, counts: RunCounts, figures: Mapping[str, TaskFigures]) -> dict[str, NextJob]:
        """What the next job would do, by task; where no worker can say, the last choice logged or setting used."""
        last = {}
        for task in counts.tasks:
            if (used := counts.last_used(task)) is not None:
                last[task] = used
            for change in self._decisions.latest(task, limit=1):
                setting = change.after.mode, change.after.drafter, change.after.num_draft_tokens
                last[task] = NextJob(*setting, change.reason, change.explanation)
        tasks = [figures.get(task) or TaskFigures(task) for task in sorted({*counts.tasks, *figures})]
        return last | next_jobs(self._database, self._settings, tasks, counts.now)

    def _judge(self, counts: RunCounts) -> dict[About, Judged]:
        """Test the traffic for drift, compare the probes, and name causes."""
        accepted = self._events.accepted_levels(counts.now)
        parents = {(d.drafter, d.draft_revision): d.parent_revision for d in self._drafts.all() if d.parent_revision}
        incidents = [
            SeenIncident(known.opened_at, known.found.task, known.found.drafter, known.found.kind)
            for known in self._incidents.open_incidents()
        ]
        return judge(
            watch_traffic(self._drift_memory, self._dials, counts.now, accepted),
            probe_histories(counts.probes, parents, targets_by_revision(self._workers.seen())),
            incidents,
            counts.in_use(),
            accepted,
        )

    def _flag(self, judged: Mapping[About, Judged], choices: Mapping[str, NextJob], now: datetime) -> Flagged:
        """Open, confirm and close drift events; make drafts stale or active."""
        changes = event_changes(
            judged,
            self._events.since(now - REOPENED_WITHIN),
            lambda finding: self._cost_of_inaction(finding, choices, now),
            now,
            forget_after=timedelta(days=self._dials.history_retention_days),
        )
        self._events.write(changes, now)
        of_drafts = status_changes(judged.values(), self._statuses())
        for status in of_drafts:
            self._drafts.set_status(*astuple(status))
        states = Counter(change.state for change in changes)
        num_opened = states[EventState.OPENED] + states[EventState.REOPENED]
        return Flagged(num_opened, states[EventState.CLOSED], len(of_drafts))

    def _statuses(self) -> dict[Draft, DraftStatus]:
        return {(d.drafter, d.draft_revision, d.target_revision): d.status for d in self._drafts.all()}

    def _cost_of_inaction(self, finding: DriftFinding, choices: Mapping[str, NextJob], now: datetime) -> float | None:
        task, began = finding.subject.task, finding.began_after
        pace = TaskPace(
            tokens_per_s=self._drift.num_tokens(now - _DAY, now).get(task, 0) / _DAY.total_seconds(),
            setting=choices.get(task),
            measured_before=None if began is None else self._switchback.at(task, began),
            measured_now=self._switchback.shown(now).get(task),
        )
        return lost_tokens_per_s(finding, pace)

    def _end_trials(self, choices: Mapping[str, NextJob], now: datetime) -> None:
        """Keep or reject candidates whose trial is decided; retire parents that their candidates have replaced."""
        models, known = self._settings.models, self._refreshes.all()
        drafters = {task: choice.drafter for task, choice in choices.items()}
        num_jobs = partial(self._refreshes.num_jobs, until=now)
        speedups = [*self._switchback.rivals(now), *self._switchback.over_vanilla(now)]
        for trial in ended_trials(models, known, self._statuses(), speedups, drafters, num_jobs):
            refresh = trial.refresh
            self._refreshes.end(refresh.id, refresh.attempt, trial.state, sentence=trial.sentence)
            facts = {"action": f"refresh_{trial.state}", "refresh": refresh.id}
            log.info("%s: %s", refresh.candidate_name, trial.sentence, extra=facts)
        for parent, why in replaced_parents(models, known, self._statuses(), drafters, now):
            self._drafts.set_status(*parent, DraftStatus.RETIRED, why)
            log.info("%s is retired: %s", parent[0], why, extra={"action": "parent_retired", "drafter": parent[0]})

    def _open_refreshes(self, now: datetime) -> None:
        """Have drafters trained anew that no longer fit, after their statuses are known, as far as a day allows."""
        dials = self._settings.refresh
        if not dials.automatic:
            return
        if (spent_s := self._refreshes.device_s_since(now - _DAY)) >= dials.max_device_s_a_day:
            facts = {"action": "refresh_postponed", "device_s": round(spent_s)}
            log.info("no refresh is opened: trainers took %.0f s in the last day", spent_s, extra=facts)
            return
        known, workers = self._refreshes.all(), self._workers.seen()
        for due in due_refreshes(self._settings.models, workers, self._statuses(), known, now):
            try:
                self._refreshes.open(due.drafter, due.target_revision, due.parent, due.reason, now)
            except ConfigError:
                continue  # an operator was first
            facts = {"action": "refresh_opened", "drafter": due.drafter, "reason": due.reason}
            log.info("%s is trained anew for target %s", due.drafter, due.target_revision, extra=facts)

    def _send_probes(self, due: datetime, now: datetime) -> SentProbes:
        """Send the probes and controls that are due. Raises DeliveryFailed with nothing marked as sent."""
        planner = ProbePlanner(self._database, self._settings)
        sets = planner.sets()
        plan = planner.plan(sets, now)
        chosen, most = plan.chosen, self._dials.probe_prompts
        planned = make_jobs(chosen, sets, due, num_prompts=most, deadline=now + DEADLINE)
        if planned:
            # Recorded first, marked as sent when Kafka has acknowledged them.
            jobs = [probe.job for probe in planned]
            self._probes.record([self._probe_run(probe, due) for probe in planned])
            for job in jobs:
                key, value = job.job_id.encode(), encode_job(job)
                self._producer.send(jobs_topic(job.task), key=key, value=value, headers=_HEADERS)
            self._producer.flush(_FLUSH_TIMEOUT_S)
            self._probes.mark_sent([job.job_id for job in jobs], now)
        return SentProbes(plan, Counter(probe.job.task for probe in planned))

    def _probe_run(self, planned: PlannedJob, due: datetime) -> ProbeRun:
        job = planned.job
        return ProbeRun(
            job_id=job.job_id,
            schedule_id=self._schedule_id,
            scheduled_for=due,
            task=job.task,
            probe_set=planned.probe_set,
            position=planned.position,
            prompt_id=planned.prompt_id,
            purpose=job.purpose.value,
            drafter=job.probe_drafter,
            num_draft_tokens=job.probe_num_draft_tokens,
            scored_drafters=job.scored_drafters,
            payload_sha256=payload_digest(job),
        )

    def _make_report(
        self,
        counts: RunCounts,
        figures: Mapping[str, TaskFigures],
        choices: Mapping[str, NextJob],
        sent: SentProbes,
        watched: Watched,
        flagged: Flagged,
    ) -> DriftReport:
        """The report of a run, with what changed since the last one."""
        now = counts.now
        spent = {what: self._spending.by(what, begin_of(now), now) for what in REPORTED}
        by_purpose = spent[SpentBy.PURPOSE]
        all_jobs, measured = total(by_purpose), total([part for part in by_purpose if part.name in MEASURED])
        report = build_report(
            RunFindings(
                counts=counts,
                figures=figures,
                choices=choices,
                drafts=self._drafts.all(),
                events=self._events.open_events(),
                sent=sent,
                measured=self._switchback.shown(now),
                incidents=self._incidents.open_incidents(),
                lacks=self._lacks.open(),
                watched=watched,
                flagged=flagged,
                spent=spent,
                refreshes=refresh_lines(self._database, self._settings.models, within=WINDOW),
            )
        )
        # Longer than this is a gap: one run may be skipped, because another one took too long.
        longest_pause = 2 * timedelta(seconds=self._timetable.longest_pause_s(now))
        report = report.model_copy(
            update={
                "device_s": round(all_jobs.device_s, 3),
                "probe_spent_device_s": round(measured.device_s, 3),
                "cost": all_jobs.cost if self._settings.prices.per_hour is not None else None,
                "probe_cost": measured.cost if self._settings.prices.per_hour is not None else None,
                "currency": self._settings.prices.currency,
                "expectations": expectation_lines(self._expectations.shown(now)),
                "gaps": gaps(self._schedule.succeeded(counts.since, now), now, longest_pause),
                "last_decoded_at": counts.last_decoded_at or self._drift.last_decoded_at(now),
                "next_due": self._timetable.next_due(now),
            }
        )
        if (before := self._last_report()) is None:
            return report
        since = before.created_at
        states, closed = self._events.states_since(since), self._incidents.closed_since(since)
        changes = changes_between(before, report, states, closed, self._servers.changed_since(since))
        return report.model_copy(update={"changes": changes})

    def _publish(self, report: DriftReport) -> Path:
        """Put the report where people look: Postgres, the folder and the topic. Returns the page's path."""
        text, html = render_text(report), render_page(report)
        times = report.created_at, report.covers_from, report.covers_to
        self._reports.save(StoredReport(*times, report.headline, report.model_dump(mode="json"), text, html))
        folder = self._settings.report_folder
        page = write_report(folder, report, text, html)
        headings = self._reports.headings(MAX_ENTRIES)
        write_index(folder, lambda pages: render_index(headings, pages))
        self._producer.send(
            DRIFT_REPORTS, key=self._schedule_id.encode(), value=report.model_dump_json().encode(), headers=_HEADERS
        )
        self._producer.flush(_FLUSH_TIMEOUT_S)
        return page

    def _last_report(self) -> DriftReport | None:
        """The newest report; None before the first, and where another version of alphaloop wrote it otherwise."""
        if (stored := self._reports.latest()) is None:
            return None
        try:
            return DriftReport.model_validate(stored.content)
        except ValidationError as error:
            text = "the report of %s was made by another version and is not compared with: %d fields differ"
            log.warning(text, stored.created_at, error.error_count(), extra={"action": "report_not_compared"})
            return None

    def _note_failure(self, due: datetime, error: Exception, now: datetime) -> None:
        outcome = {"error": type(error).__name__}
        if isinstance(error, AlphaloopError):
            outcome = {"error": error.code, "message": error.message}
        # The database may be what failed; the first error is the one to raise.
        with suppress(StoreError):
            self._schedule.finish(self._schedule_id, due, outcome, now)


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
                _log(table, self.store.drop(table, before, time_is_up))

        history = now - timedelta(days=self.settings.history_retention_days)
        drop_reports(self.report_folder, history)
        drop(history, "decisions", "expectation_pairs", "probe_runs", "probe_texts", "schedule_runs", "reports")
        drop(history, "api_batches", "batches", "promised_ends", "ended_batches", "lacks", "refreshes")
        drop(now - HOURLY_KEPT_FOR, "acceptance_hourly")
        drop(now - DAILY_KEPT_FOR, "acceptance_daily", "drift_events", "incidents", "notifications")
        drop(now - AUDIT_KEPT_FOR, "audit")
        # A result is searched no longer than it may be read.
        forgotten = self.memory.forget_before(now - timedelta(days=self.settings.jobs_retention_days))
        _log("remembered_results", Dropped(forgotten, is_all=True))
        self.memory.delete_forgotten(now - FORGOTTEN_KEPT_FOR)
        ended = self._jobs_before(now)
        if ended is not None:
            drop(ended, "cancellations", "redrives", "reusable_results", "reused_results")
            _log("jobs", self.store.drop_jobs(ended, time_is_up))
            # A dead letter that was sent again refers to the prompt of the first message, and is kept as long anew.
            self._drop_contents(ended, ended - (now - ended), time_is_up)

    def _drop_contents(self, texts_before: datetime, prompts_before: datetime, time_is_up: Callable[[], bool]) -> None:
        """Delete what lies in the store of contents; a store that is away only postpones that."""
        if self.contents is None:
            return
        try:
            _log("stored_texts", self.store.drop_texts(texts_before, time_is_up, self.contents.delete))
            _log("bodies", Dropped(*drop_prompts(self.contents, prompts_before, time_is_up)))
        except ContentError as error:
            postponed = {"action": "retention_postponed", "code": error.code, "hint": error.hint or ""}
            log.warning("texts and prompts were not deleted: %s", error.message, extra=postponed)

    def _jobs_before(self, now: datetime) -> datetime | None:
        """Before when jobs must have ended to be deleted; None: no job may be deleted.

        A row of `jobs` shows that a record is a redelivery, so it must outlive every message that may be read again.
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
            text = "jobs are kept for %s instead of %s, because their topics keep messages so long"
            log.warning(text, least, wanted, extra={"action": "retention_extended"})
        return now - max(wanted, least)


def _log(table: str, dropped: Dropped) -> None:
    if dropped.num_rows or not dropped.is_all:
        facts = {"action": "retention", "table": table, "num_rows": dropped.num_rows, "is_all": dropped.is_all}
        log.info("deleted %d of %s", dropped.num_rows, table, extra=facts)
