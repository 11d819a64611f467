"""What a scrape shows of steps and costs."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest
from prometheus_client import generate_latest

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.cost import CostPoint
from alphaloop.store.decode_runs import DecodeRun
from alphaloop.store.outcomes import Outcome
from worker.costs.live import LiveCosts
from worker.engine import Step
from worker.metrics import WorkerMetrics


def run_of(mode: str, first_s: float, wall_s: float, num_tokens: int) -> DecodeRun:
    """A run that waited for three seconds."""
    return DecodeRun(
        key=EvidenceKey("code", "", "t1", "", "", "e", "greedy", "short"),
        decode_batch_id=UUID(int=1),
        purpose="traffic",
        mode=mode,
        num_draft_tokens=0,
        reason="faster",
        device="cpu",
        counts=AcceptanceCounts(rounds=num_tokens),
        chances=None,
        num_prompt_tokens=5,
        num_tokens=num_tokens,
        batch_size=1,
        queue_s=3.0,
        time_to_first_token_s=first_s,
        wall_s=wall_s,
        device_s=wall_s,
        decoded_at=datetime(2026, 11, 23, tzinfo=UTC),
    )


def outcome_of(run: DecodeRun) -> Outcome:
    return Outcome("j", 1, "succeeded", b"{}", "results", {}, run)


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


def test_latencies_are_told_apart_by_mode() -> None:
    metrics = WorkerMetrics()
    fast, slow, one_token = (
        run_of("speculative", 0.2, 1.2, 11),
        run_of("vanilla", 0.5, 2.5, 5),
        run_of("vanilla", 1, 1, 1),
    )
    metrics.recorded("code", "traffic", [outcome_of(run) for run in (fast, slow, one_token)])
    for mode, first, per_token, whole in (("speculative", 0.2, 0.1, 4.2), ("vanilla", 1.5, 0.5, 9.5)):
        for name, total in (
            ("time_to_first_token", first),
            ("time_per_output_token", per_token),
            ("e2e_request_latency", whole),
        ):
            found = value(metrics, f"alphaloop_{name}_seconds_sum", task="code", mode=mode)
            assert found == pytest.approx(total), (name, mode)
    # A text of one token has no time between two tokens.
    assert value(metrics, "alphaloop_time_per_output_token_seconds_count", task="code", mode="vanilla") == 1
