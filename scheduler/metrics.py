"""The metrics of the scheduler. Labels are tasks, causes and outcomes, which have few values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from alphaloop.console.reading import Remembered
from alphaloop.store.drift import IncidentKind
from alphaloop.store.lacks import Lack
from scheduler.causes import Cause
from scheduler.probing import SentProbes
from scheduler.report.data import DriftReport, MeasuredLine

BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Gauges of the measured speed-up of a task; the first three are missing until there is one.
SPEEDUP: Final = {
    "ratio": "Measured speed-up over vanilla",
    "low": "Its lower 95 % bound",
    "high": "Its upper 95 % bound",
    "blocks": "Blocks behind it; the least for an estimate are 8",
    "min_draft_tokens": "Smallest k that was used",
    "max_draft_tokens": "Largest k that was used",
    "mean_running": "Sequences of all tasks in a round",
    "control_share": "Of seconds times sequences, those in control slices",
}
#: Gauges of expected beside measured speed-ups, the newest 32 pairs of the last 7 days; missing without a pair.
EXPECTATION: Final = {
    "pairs": "Expected speed-ups that were compared with the one measured over the same rounds",
    "held_share": "Of these, the share whose 95 % interval holds the measured speed-up",
    "ratio": "Measured over expected speed-up, geometric mean; below 1, expectations are too good",
}
#: Acceptance of the first drafted tokens of a task's traffic in the last day; missing without a trial.
ALPHA_1: Final = {
    "mean": "Share of first drafted tokens that the target accepted, of the last day's traffic",
    "low": "Its lower 95 % bound",
    "high": "Its upper 95 % bound",
}


class SchedulerMetrics:
    """The metrics of this process."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        prefix, registry = "alphaloop_scheduler", self.registry

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", text, labels, registry=registry)

        def figures(name: str, texts: Mapping[str, str]) -> dict[str, Gauge]:
            return {part: gauge(f"{name}_{part}", text, "task", "drafter") for part, text in texts.items()}

        ProcessCollector(registry=registry)  # when the process started, its memory and its processor time
        self._runs = counter("runs", "Measurement runs by outcome", "outcome")
        self._seconds = Histogram(
            f"{prefix}_run_seconds", "Duration of a measurement run", buckets=BUCKETS, registry=registry
        )
        self._last = gauge("last_success_timestamp_seconds", "When the last run succeeded")
        self._pause = gauge("longest_pause_seconds", "Longest time between two due runs")
        self._leader = gauge("is_leader", "1 while this process leads")
        self._leads = True  # whoever shows something before it was said who leads runs once
        self._missed = counter("missed_ticks", "Ticks that came too late to run")
        self._probes = counter("probe_jobs", "Probes and controls sent", "task")
        self._budget = gauge("probe_budget_seconds", "Device time a run's probes may take")
        self._drift = gauge("open_drift_events", "Drift that is not over", "cause", "acknowledged")
        self._opened = gauge(
            "oldest_drift_timestamp_seconds", "When the oldest drift that is not over was opened", "task", "cause"
        )
        self._lost = gauge(
            "lost_tokens_per_second", "What open drift costs, by cause; without what is not known", "cause"
        )
        self._stale = gauge("stale_drafts", "Draft revisions flagged stale")
        self._incidents = gauge("open_incidents", "Incidents that are not over", "kind")
        due = "Runs in a row in which probes of a drafter in a task were due; missing where they were not"
        self._due_runs = gauge("probe_due_runs", due, "task", "drafter")
        self._num_runs_due: dict[tuple[str, str], int] = {}
        self._compared = counter("compared_probes", "Probes compared with their controls, by outcome", "outcome")
        self._reports = counter("reports", "Reports made")
        tried = "Attempts to notify, by outcome: sent, failed, or given_up with the last failure"
        self._notifications = counter("notifications", tried, "sink", "outcome")
        self._failures = gauge("notification_failures", "Attempts in a row that a sink did not take", "sink")
        self._speedup, self._alpha_1 = figures("speedup", SPEEDUP), figures("alpha_1", ALPHA_1)
        needed = "Workers with which deadlines of batches are met and other work is through in time; missing: not known"
        self._devices_needed = gauge("devices_needed", needed, "target")
        self._lacks = gauge("open_lacks", "Segments whose deadlines will be missed with the workers that run", "target")
        late = "Largest share of a segment's deadlines that will be missed, of the open lacks; missing without one"
        self._late = gauge("late_share", late, "target")
        self._jobs = gauge("jobs", "Jobs of the last day that workers claimed", "task", "purpose")
        self._expectation = figures("expectation", EXPECTATION)
        for outcome in ("succeeded", "failed"):
            self._runs.labels(outcome)

    def time_run(self) -> AbstractContextManager[object]:
        """Time a run, also one that fails."""
        return self._seconds.time()

    def run_failed(self) -> None:
        """Count a run that raised."""
        self._runs.labels("failed").inc()

    def run_succeeded(self, report: DriftReport, sent: SentProbes) -> None:
        """Count a run and what it did, and show what it found."""
        self._runs.labels("succeeded").inc()
        self._reports.inc()
        pairs = report.exactness
        num_wrong = pairs.num_pairs - pairs.num_equal - pairs.num_near_ties
        for outcome, number in (("equal", pairs.num_equal), ("near_tie", pairs.num_near_ties), ("wrong", num_wrong)):
            self._compared.labels(outcome).inc(number)
        for task, number in sent.num_jobs_by_task.items():
            self._probes.labels(task).inc(number)
        self.show(report)

    def show(self, report: DriftReport) -> None:
        """Show what a run found: one of this process, or the last one of the leader before it."""
        self._last.set(report.created_at.timestamp())
        self._budget.set(report.probe_budget_device_s)
        self._stale.set([draft.status for draft in report.drafts].count("stale"))
        for cause in Cause:
            lines = [line for line in report.drift if line.cause is cause]
            num_acknowledged = sum(line.acknowledged_by is not None for line in lines)
            self._drift.labels(cause.value, "no").set(len(lines) - num_acknowledged)
            self._drift.labels(cause.value, "yes").set(num_acknowledged)
            self._lost.labels(cause.value).set(sum(line.lost_tokens_per_s or 0.0 for line in lines))
        self._opened.clear()
        for line in sorted(report.drift, key=lambda line: line.opened_at, reverse=True):
            self._opened.labels(line.task, line.cause.value).set(line.opened_at.timestamp())
        kinds = [line.kind for line in report.incidents]
        for kind in IncidentKind:
            self._incidents.labels(kind.value).set(kinds.count(kind))
        due = {(line.task, line.drafter) for line in (*report.probes, *report.probes_waiting)}
        self._num_runs_due = {pair: self._num_runs_due.get(pair, 0) + 1 for pair in due}
        self._due_runs.clear()
        for pair, num_runs in self._num_runs_due.items():
            self._due_runs.labels(*pair).set(num_runs)
        self._set_figures(report)

    def _set_figures(self, report: DriftReport) -> None:
        self._jobs.clear()
        for line in report.tasks:
            by_purpose = {"traffic": line.num_jobs, "probe": line.num_probes, "control": line.num_controls}
            for purpose, number in by_purpose.items():
                self._jobs.labels(line.task, purpose).set(number)
        for figures in (self._alpha_1, self._speedup, self._expectation):
            for gauge in figures.values():
                gauge.clear()
        for line in report.tasks:
            if line.alpha_1 is not None and line.acceptance_from == "traffic":
                _set(self._alpha_1, line.task, line.acceptance_drafter or "", asdict(line.alpha_1))
            if line.measured is not None:
                _set(self._speedup, line.task, line.measured.drafter, _of_speedup(line.measured))
        for expected in report.expectations:
            if n := expected.num_pairs:
                values = {"pairs": n, "held_share": expected.num_held / n, "ratio": expected.ratio}
                _set(self._expectation, expected.task, expected.drafter, values)

    def show_foreseen(self, devices_needed: Mapping[str, int | None], lacks: Sequence[Lack]) -> None:
        """Show what a look ahead found; what is not known is missing. Nothing once this process leads no more."""
        for shown in (self._devices_needed, self._lacks, self._late):
            shown.clear()
        for target, number in devices_needed.items() if self._leads else ():
            if number is not None:
                self._devices_needed.labels(target).set(number)
            late = [lack.num_late / max(1, lack.num_due) for lack in lacks if lack.target == target]
            self._lacks.labels(target).set(len(late))
            if late:
                self._late.labels(target).set(max(late))

    def forget_foreseen(self) -> None:
        """Show nothing of it: a look has failed."""
        self.show_foreseen({}, ())

    def know_sink(self, sink: str) -> None:
        """Show a sink from the start, so that its first failure is seen as an increase."""
        for outcome in ("sent", "failed", "given_up"):
            self._notifications.labels(sink, outcome)
        self._failures.labels(sink).set(0)

    def notification_sent(self, sink: str) -> None:
        """Count a notification that a sink took."""
        self._notifications.labels(sink, "sent").inc()
        self._failures.labels(sink).set(0)

    def notification_failed(self, sink: str, *, is_last: bool) -> None:
        """Count one that it did not take; after the last attempt it is sent no more."""
        self._notifications.labels(sink, "given_up" if is_last else "failed").inc()
        self._failures.labels(sink).inc()

    def tick_missed(self) -> None:
        """Count a tick that came too late."""
        self._missed.inc()

    def set_leader(self, is_leader: bool) -> None:
        """Record whether this process leads. One that does not any more no longer shows what it found."""
        self._leads = is_leader
        self._leader.set(is_leader)
        if is_leader:
            return
        self.forget_foreseen()
        gauges = (self._drift, self._opened, self._lost, self._due_runs, self._incidents, self._failures, self._jobs)
        for gauge in (*gauges, *self._alpha_1.values(), *self._speedup.values(), *self._expectation.values()):
            gauge.clear()
        self._num_runs_due = {}
        for number in (self._budget, self._stale):
            number.set(math.nan)

    def set_longest_pause(self, seconds: float) -> None:
        """Show the longest time between two due runs, which shows that a run is missing and not rare."""
        self._pause.set(seconds)


def _set(gauges: Mapping[str, Gauge], task: str, drafter: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        gauges[name].labels(task, drafter).set(value)


def _of_speedup(measured: MeasuredLine) -> dict[str, float]:
    return {
        "blocks": measured.num_blocks,
        "min_draft_tokens": measured.min_num_draft_tokens,
        "max_draft_tokens": measured.max_num_draft_tokens,
        "mean_running": measured.mean_running,
        "control_share": measured.control_share,
        **({"ratio": ratio.mean, "low": ratio.low, "high": ratio.high} if (ratio := measured.speedup) else {}),
    }


class KafkaLag(Collector):
    """The messages of each task that no worker has finished.

    They are counted in the background at a scrape, so that no scrape waits for a broker. What was counted
    long ago, or could not be counted, is missing.
    """

    #: Between two counts; longer where one takes long.
    PAUSE_S: Final = 10.0
    OLDEST_S: Final = 300.0

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = lambda: (count(), time.monotonic())
        self._remembered = Remembered(self.PAUSE_S, num_threads=1, patience_s=0.0)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The metric without values: to register it asks no broker."""
        yield GaugeMetricFamily(
            "alphaloop_scheduler_kafka_lag",
            "Messages that no worker has finished, waiting or being decoded; those to be tried again too",
            labels=["task"],
        )

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """What was counted last."""
        for metric in self.describe():
            counted = self._remembered.get("lag", self._count)
            if counted.value is not None and counted.error is None:
                numbers, counted_at = counted.value
                is_new = time.monotonic() - counted_at < self.OLDEST_S
                for task, number in numbers.items() if is_new else ():
                    metric.add_metric([task], number)
            yield metric

    def close(self) -> None:
        """Count no more."""
        self._remembered.close()
