"""What the scheduler's metrics show of a run, of the run of another process, and once it leads no more."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Final

from alphaloop.store.lacks import Lack
from scheduler.metrics import SchedulerMetrics
from scheduler.probing import SentProbes
from scheduler.report.data import DriftReport
from tests.fixtures.reports import AT, empty, full

PREFIX: Final = "alphaloop_scheduler_"


def value(metrics: SchedulerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"alphaloop_scheduler_{name}", labels)


def due(metrics: SchedulerMetrics) -> dict[str, float]:
    """Runs in a row, by drafter."""
    (family,) = (one for one in metrics.registry.collect() if one.name == "alphaloop_scheduler_probe_due_runs")
    return {sample.labels["drafter"]: sample.value for sample in family.samples}


def report_due(*, sent: tuple[str, ...] = (), waiting: tuple[str, ...] = ()) -> DriftReport:
    (line,) = full().probes
    lines = {name: line.model_copy(update={"drafter": name}) for name in (*sent, *waiting)}
    update = {"probes": tuple(lines[n] for n in sent), "probes_waiting": tuple(lines[n] for n in waiting)}
    return empty().model_copy(update=update)


def test_probes_that_stay_due_are_counted_by_runs() -> None:
    metrics = SchedulerMetrics()
    metrics.show(report_due(sent=("lookup", "tiny")))
    metrics.show(report_due(waiting=("tiny",)))
    assert due(metrics) == {"tiny": 2}
    metrics.show(report_due(sent=("tiny", "lookup")))
    assert due(metrics) == {"tiny": 3, "lookup": 1}
    metrics.show(empty())
    assert due(metrics) == {}


def test_of_several_events_the_oldest_is_shown() -> None:
    metrics = SchedulerMetrics()
    (line,) = full().drift
    older = line.model_copy(update={"drafter": "tiny", "opened_at": AT - timedelta(days=9)})
    for lines in ((line, older), (older, line)):
        metrics.show(empty().model_copy(update={"drift": lines}))
        shown = value(metrics, "oldest_drift_timestamp_seconds", task="code", cause=line.cause.value)
        assert shown == older.opened_at.timestamp()
    metrics.show(empty())
    assert value(metrics, "oldest_drift_timestamp_seconds", task="code", cause=line.cause.value) is None


def test_the_run_of_another_process_is_shown_and_not_counted() -> None:
    metrics = SchedulerMetrics()
    metrics.show(full())
    assert value(metrics, "last_success_timestamp_seconds") == AT.timestamp()
    assert value(metrics, "open_drift_events", cause="draft_stale", acknowledged="no") == 1
    assert (value(metrics, "runs_total", outcome="succeeded"), value(metrics, "reports_total")) == (0, 0)
    metrics.run_succeeded(full(), SentProbes(num_jobs_by_task={"code": 8}))
    assert (value(metrics, "runs_total", outcome="succeeded"), value(metrics, "reports_total")) == (1, 1)
    assert value(metrics, "probe_jobs_total", task="code") == 8


def test_a_process_that_leads_no_more_does_not_show_what_it_found() -> None:
    metrics = SchedulerMetrics()
    metrics.set_leader(True)
    metrics.know_sink("JSON 00000001")
    metrics.show(full())
    before = shown(metrics)
    assert {"open_drift_events", "open_incidents", "speedup_ratio", "expectation_ratio", "probe_due_runs"} <= before
    metrics.set_leader(False)
    assert shown(metrics) == {"is_leader", "last_success_timestamp_seconds", "longest_pause_seconds"}
    assert math.isnan(value(metrics, "stale_drafts") or 0.0), "max() over processes leaves NaN out"
    assert value(metrics, "last_success_timestamp_seconds") == AT.timestamp(), "when it was stays true"


def shown(metrics: SchedulerMetrics) -> set[str]:
    """Gauges with a figure; those about the process itself are left out."""
    families = [one for one in metrics.registry.collect() if one.type == "gauge" and one.name.startswith(PREFIX)]
    found = [sample for one in families for sample in one.samples]
    # A counter's time of creation comes as a gauge.
    return {
        sample.name.removeprefix(PREFIX)
        for sample in found
        if not math.isnan(sample.value) and not sample.name.endswith("_created")
    }


def test_what_is_foreseen_is_missing_where_it_is_not_known_and_once_this_process_leads_no_more() -> None:
    metrics = SchedulerMetrics()
    lack = Lack("large", "gold", AT, AT, 0.25, AT, 40, 10, 1, 2, AT, "Late.")
    worse = replace(lack, segment="", num_late=30)
    metrics.set_leader(True)
    metrics.show_foreseen({"large": 2, "small": 0, "new": None}, [lack, worse])
    needed = [value(metrics, "devices_needed", target=target) for target in ("large", "small", "new")]
    assert needed == [2, 0, None]
    assert [value(metrics, "open_lacks", target=target) for target in ("large", "small", "new")] == [2, 0, 0]
    assert (value(metrics, "late_share", target="large"), value(metrics, "late_share", target="small")) == (0.75, None)
    metrics.show_foreseen({"large": 1}, [])
    assert (value(metrics, "devices_needed", target="large"), value(metrics, "devices_needed", target="small")) == (
        1,
        None,
    )
    assert value(metrics, "late_share", target="large") is None
    metrics.set_leader(False)
    assert value(metrics, "devices_needed", target="large") is None
    metrics.show_foreseen({"large": 1}, [lack])  # by a look that was under way
    assert value(metrics, "devices_needed", target="large") is None
    assert value(metrics, "open_lacks", target="large") is None
