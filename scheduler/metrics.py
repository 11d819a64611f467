"""The metrics of the scheduler. Labels are tasks, causes and outcomes, which have few values."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from alphaloop.console.reading import Remembered
from alphaloop.store.incidents import IncidentKind
from scheduler.causes import Cause
from scheduler.probing import SentProbes
from scheduler.report.data import DriftReport

BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Of the measured speed-up of a task; the first three are missing until there is one.
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
#: Of expected beside measured speed-ups of a task, the newest 32 pairs of the last 7 days; missing without a pair.
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
        ProcessCollector(registry=registry)  # when the process started, its memory and its processor time
        self._runs = Counter(f"{prefix}_runs", "Measurement runs by outcome", ["outcome"], registry=registry)
        self._seconds = Histogram(
            f"{prefix}_run_seconds", "Duration of a measurement run", buckets=BUCKETS, registry=registry
        )
        self._last = Gauge(f"{prefix}_last_success_timestamp_seconds", "When the last run succeeded", registry=registry)
        self._pause = Gauge(f"{prefix}_longest_pause_seconds", "Longest time between two due runs", registry=registry)
        self._leader = Gauge(f"{prefix}_is_leader", "1 while this process leads", registry=registry)
        self._missed = Counter(f"{prefix}_missed_ticks", "Ticks that came too late to run", registry=registry)
        self._probes = Counter(f"{prefix}_probe_jobs", "Probes and controls sent", ["task"], registry=registry)
        self._budget = Gauge(f"{prefix}_probe_budget_seconds", "Device time a run's probes may take", registry=registry)
        self._drift = Gauge(
            f"{prefix}_open_drift_events", "Drift that is not over", ["cause", "acknowledged"], registry=registry
        )
        self._opened = Gauge(
            f"{prefix}_oldest_drift_timestamp_seconds",
            "When the oldest drift that is not over was opened",
            ["task", "cause"],
            registry=registry,
        )
        self._lost = Gauge(
            f"{prefix}_lost_tokens_per_second",
            "What open drift costs, by cause; without what is not known",
            ["cause"],
            registry=registry,
        )
        self._stale = Gauge(f"{prefix}_stale_drafts", "Draft revisions flagged stale", registry=registry)
        self._incidents = Gauge(f"{prefix}_open_incidents", "Incidents that are not over", ["kind"], registry=registry)
        self._due_runs = Gauge(
            f"{prefix}_probe_due_runs",
            "Runs in a row in which probes of a drafter in a task were due; missing where they were not",
            ["task", "drafter"],
            registry=registry,
        )
        self._num_runs_due: dict[tuple[str, str], int] = {}
        self._compared = Counter(
            f"{prefix}_compared_probes",
            "Probes compared with their controls, by outcome",
            ["outcome"],
            registry=registry,
        )
        self._reports = Counter(f"{prefix}_reports", "Reports made", registry=registry)
        self._notifications = Counter(
            f"{prefix}_notifications",
            "Attempts to notify, by outcome: sent, failed, or given_up with the last failure",
            ["sink", "outcome"],
            registry=registry,
        )
        self._failures = Gauge(
            f"{prefix}_notification_failures",
            "Attempts in a row that a sink did not take",
            ["sink"],
            registry=registry,
        )
        labels = ["task", "drafter"]
        self._speedup = {
            name: Gauge(f"{prefix}_speedup_{name}", text, labels, registry=registry) for name, text in SPEEDUP.items()
        }
        self._alpha_1 = {
            name: Gauge(f"{prefix}_alpha_1_{name}", text, labels, registry=registry) for name, text in ALPHA_1.items()
        }
        self._jobs = Gauge(
            f"{prefix}_jobs", "Jobs of the last day that workers claimed", ["task", "purpose"], registry=registry
        )
        self._expectation = {
            name: Gauge(f"{prefix}_expectation_{name}", text, labels, registry=registry)
            for name, text in EXPECTATION.items()
        }
        for outcome in ("succeeded", "failed"):
            self._runs.labels(outcome)

    @contextmanager
    def time_run(self) -> Iterator[None]:
        """Time a run, also one that fails."""
        with self._seconds.time():
            yield

    def run_failed(self) -> None:
        """Count a run that raised."""
        self._runs.labels("failed").inc()

    def run_succeeded(self, report: DriftReport, sent: SentProbes) -> None:
        """Count a run and what it did, and show what it found."""
        self._runs.labels("succeeded").inc()
        self._reports.inc()
        exactness = report.exactness
        num_wrong = exactness.num_pairs - exactness.num_equal - exactness.num_near_ties
        for outcome, number in (
            ("equal", exactness.num_equal),
            ("near_tie", exactness.num_near_ties),
            ("wrong", num_wrong),
        ):
            self._compared.labels(outcome).inc(number)
        for task, number in sent.num_jobs_by_task.items():
            self._probes.labels(task).inc(number)
        self.show(report)

    def show(self, report: DriftReport) -> None:
        """Show what a run found: one of this process, or the last one of the leader before it."""
        self._last.set(report.created_at.timestamp())
        self._budget.set(report.probe_budget_device_s)
        self._stale.set(sum(1 for draft in report.drafts if draft.status == "stale"))
        found = collections.Counter((line.cause, line.acknowledged_by is not None) for line in report.drift)
        for cause in Cause:
            self._drift.labels(cause.value, "no").set(found[cause, False])
            self._drift.labels(cause.value, "yes").set(found[cause, True])
            self._lost.labels(cause.value).set(
                sum(line.lost_tokens_per_s or 0.0 for line in report.drift if line.cause is cause)
            )
        self._opened.clear()
        for line in sorted(report.drift, key=lambda line: line.opened_at, reverse=True):
            self._opened.labels(line.task, line.cause.value).set(line.opened_at.timestamp())
        self._set_due(report)
        self._set_figures(report)
        self._set_speedups(report)
        self._set_expectations(report)
        incidents_by_kind = collections.Counter(line.kind for line in report.incidents)
        for kind in IncidentKind:
            self._incidents.labels(kind.value).set(incidents_by_kind[kind])

    def _set_due(self, report: DriftReport) -> None:
        due = {(line.task, line.drafter) for line in (*report.probes, *report.probes_waiting)}
        self._num_runs_due = {pair: self._num_runs_due.get(pair, 0) + 1 for pair in due}
        self._due_runs.clear()
        for pair, num_runs in self._num_runs_due.items():
            self._due_runs.labels(*pair).set(num_runs)

    def _set_figures(self, report: DriftReport) -> None:
        self._jobs.clear()
        for gauge in self._alpha_1.values():
            gauge.clear()
        for line in report.tasks:
            by_purpose = {"traffic": line.num_jobs, "probe": line.num_probes, "control": line.num_controls}
            for purpose, number in by_purpose.items():
                self._jobs.labels(line.task, purpose).set(number)
            if line.alpha_1 is not None and line.acceptance_from == "traffic":
                for name, value in asdict(line.alpha_1).items():
                    self._alpha_1[name].labels(line.task, line.acceptance_drafter).set(value)

    def _set_speedups(self, report: DriftReport) -> None:
        for gauge in self._speedup.values():
            gauge.clear()
        for line in report.tasks:
            measured = line.measured
            if measured is None:
                continue
            found = {
                "blocks": measured.num_blocks,
                "min_draft_tokens": measured.min_num_draft_tokens,
                "max_draft_tokens": measured.max_num_draft_tokens,
                "mean_running": measured.mean_running,
                "control_share": measured.control_share,
            }
            if measured.speedup is not None:
                found |= {"ratio": measured.speedup.mean, "low": measured.speedup.low, "high": measured.speedup.high}
            for name, value in found.items():
                self._speedup[name].labels(line.task, measured.drafter).set(value)

    def _set_expectations(self, report: DriftReport) -> None:
        for gauge in self._expectation.values():
            gauge.clear()
        for line in report.expectations:
            found = {"pairs": line.num_pairs, "held_share": line.num_held / line.num_pairs, "ratio": line.ratio}
            for name, value in found.items():
                self._expectation[name].labels(line.task, line.drafter).set(value)

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
        self._leader.set(is_leader)
        if is_leader:
            return
        found = (self._drift, self._opened, self._lost, self._due_runs, self._incidents, self._failures, self._jobs)
        for gauge in (*found, *self._alpha_1.values(), *self._speedup.values(), *self._expectation.values()):
            gauge.clear()
        self._num_runs_due = {}
        for number in (self._budget, self._stale):
            number.set(math.nan)

    def set_longest_pause(self, seconds: float) -> None:
        """Show the longest time between two due runs, by which a missing run is told from a rare one."""
        self._pause.set(seconds)


class KafkaLag(Collector):
    """The messages of each task that no worker has finished.

    They are counted in the background when somebody scrapes, so that no scrape waits for a broker. What was counted
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
