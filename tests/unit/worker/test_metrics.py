"""What a scrape shows of steps and costs."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from alphaloop.cost import CostPoint
from worker.costs.live import LiveCosts
from worker.engine import Step
from worker.metrics import WorkerMetrics


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_step_shows_where_its_time_went() -> None:
    metrics = WorkerMetrics()
    metrics.stepped(Step((), (), 3, 5, 0.05, draft_s=0.01, verify_s=0.03, overhead_s=0.005, drafter="lookup"))
    metrics.stepped(Step((), (), 2, 1, 0.02, verify_s=0.015, overhead_s=0.001))
    metrics.stepped(Step((), (), 1, 400, 0.4, num_prefill_tokens=400))
    assert value(metrics, "alphaloop_step_seconds_count") == 3
    for part, count, total in (("draft", 1, 0.01), ("verify", 2, 0.045), ("overhead", 2, 0.006)):
        assert value(metrics, f"alphaloop_step_{part}_seconds_count") == count
        assert value(metrics, f"alphaloop_step_{part}_seconds_sum") == total
    # A prompt's length is no width: only rounds have one.
    assert value(metrics, "alphaloop_step_width_sum") == 6
    assert value(metrics, "alphaloop_step_batch_size_sum") == 6
    assert value(metrics, "alphaloop_step_prefill_tokens_total") == 400


def test_the_level_of_costs_is_that_of_the_last_decision() -> None:
    metrics = WorkerMetrics()
    points = [CostPoint(None, 1, 1, 10.0, 3), CostPoint("lookup", 1, 9, 0.1, 3)]
    costs = LiveCosts(points, half_life=4, save=lambda points: None, save_every_s=60.0)
    metrics.watch_costs(costs)
    assert value(metrics, "alphaloop_cost_level", part="target") == 1.0
    for _ in range(5):
        costs.observe(Step((), (), 1, 1, 0.03, verify_s=0.03, context=256))
    assert costs.table.part_ms(None, 1, 1) == pytest.approx(30.0)
    assert abs((value(metrics, "alphaloop_cost_level", part="target") or 0) - 3.0) < 1e-9
    assert value(metrics, "alphaloop_cost_level", part="lookup") == pytest.approx(1.0, abs=0.01)
    assert b"job" not in b"".join(line for line in generate_latest(metrics.registry).splitlines() if b"step_" in line)
