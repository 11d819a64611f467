"""Occupied slots, read from what a worker's own metrics show."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from benchmarks.workers import StepSums, parse_step_sums
from worker.engine import Step
from worker.metrics import WorkerMetrics


def test_sums_are_those_of_the_workers_own_histograms() -> None:
    metrics = WorkerMetrics()
    for batch in (8, 8, 5):
        metrics.stepped(Step((), (), batch, 1, wall_s=0.25))
    assert parse_step_sums(generate_latest(metrics.registry).decode()) == StepSums(3, 21, 0.75)


def test_a_worker_without_these_metrics_is_named() -> None:
    with pytest.raises(ValueError, match="alphaloop_step_batch_size_count"):
        parse_step_sums("# TYPE other counter\nother_total 1.0\n")


def test_what_came_before_is_not_counted() -> None:
    since = StepSums(12, 70, 9.0).since(StepSums(2, 10, 4.0))
    assert since == StepSums(10, 60, 5.0)
    assert since.occupied(8) == pytest.approx(0.75)


def test_no_steps_have_no_share() -> None:
    assert StepSums(0, 0, 0.0).occupied(8) is None
