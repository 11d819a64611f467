"""What a scrape shows of steps and costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.costs import CostPoint
from alphaloop.engine import Load, Step
from alphaloop.errors import RequestRefused, StoreError
from alphaloop.messages import Mode
from alphaloop.store.outcomes import Outcome
from tests.fixtures.runs import decode_run
from tests.fixtures.simulated import FleetSimulation, SimulatedJob, server_of
from worker.costs.learning import LiveCosts
from worker.metrics import EndpointMetrics, WorkerMetrics
from worker.servers.load import Present


def outcome_of(mode: str, first_s: float, wall_s: float, num_tokens: int) -> Outcome:
    """Of a run that waited for three seconds."""
    run = decode_run(AcceptanceCounts(rounds=num_tokens), mode=Mode(mode))
    run = replace(run, num_tokens=num_tokens, queue_s=3.0, time_to_first_token_s=first_s, wall_s=wall_s)
    return Outcome("j", 1, "succeeded", b"{}", "results", {}, run)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_step_shows_where_its_time_went() -> None:
    metrics = WorkerMetrics()
    metrics.stepped(Step((), (), 3, 5, 0.05, draft_s=0.01, verify_s=0.03, overhead_s=0.005, drafter="lookup"))
    metrics.stepped(Step((), (), 2, 1, 0.02, verify_s=0.015, overhead_s=0.001))
    metrics.stepped(Step((), (), 1, 400, 0.4, num_prefill_tokens=400))
    metrics.stepped(
        Step((), (), 0, 1, 0.0, num_prefix_cache_hits=2, num_prefix_cache_tokens=3000, prefix_cache_bytes=1 << 20)
    )
    assert value(metrics, "alphaloop_step_seconds_count") == 4
    for part, count, total in (("draft", 1, 0.01), ("verify", 2, 0.045), ("overhead", 2, 0.006)):
        assert value(metrics, f"alphaloop_step_{part}_seconds_count") == count
        assert value(metrics, f"alphaloop_step_{part}_seconds_sum") == total
    # A prompt's length is no width: only rounds have one.
    assert value(metrics, "alphaloop_step_width_sum") == 6
    assert value(metrics, "alphaloop_step_batch_size_sum") == 6
    assert value(metrics, "alphaloop_step_prefill_tokens_total") == 400
    assert value(metrics, "alphaloop_prefix_cache_hits_total") == 2
    assert value(metrics, "alphaloop_prefix_cache_tokens_total") == 3000
    assert value(metrics, "alphaloop_prefix_cache_bytes") == 1 << 20


def test_the_level_of_costs_is_that_of_the_last_decision() -> None:
    metrics = WorkerMetrics()
    points = [CostPoint(None, 1, 1, 10.0, 3), CostPoint("lookup", 1, 9, 0.1, 3)]
    costs = LiveCosts(points, half_life=4, save=lambda points: None)
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
    runs = ("speculative", 0.2, 1.2, 11), ("vanilla", 0.5, 2.5, 5), ("vanilla", 1, 1, 1)
    metrics.recorded("code", "traffic", [outcome_of(*run) for run in runs])
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


ENDPOINTS = (server_of("plain", None, 0, 4), server_of("ngram", "ngram", 4, 4))


class Servers:
    """A fleet as an engine shows it, with two jobs in line for a route."""

    def __init__(self) -> None:
        self.simulation = FleetSimulation(ENDPOINTS, seed=0)
        self.fleet = self.simulation.fleet
        self.registry = CollectorRegistry()
        engine = SimpleNamespace(
            endpoints=self.fleet.statuses,
            unavailable=self.fleet.unavailable,
            suspects=self.fleet.suspects,
            measures_itself=False,
            times_steps=False,
            doubt=lambda alarms: None,
            load=lambda: Load(3, 8, frozenset({"a", "b"}), frozenset({"a"})),
        )
        self.registry.register(EndpointMetrics(engine))  # type: ignore[arg-type]

    def failures(self, endpoint: str, code: str) -> float | None:
        labels = {"endpoint": endpoint, "drafter": "" if endpoint == "plain" else endpoint, "code": code}
        return self.registry.get_sample_value("alphaloop_endpoint_failures_total", labels)


def test_failures_are_counted_by_endpoint_and_kind_from_zero() -> None:
    servers = Servers()
    for error in (RequestRefused(), RequestRefused(), StoreError("of a kind that no server has")):
        servers.fleet.failed("ngram", error)
    assert [servers.failures("ngram", code) for code in ("request_refused", "reply_cut", "other")] == [2, 0, 1]
    assert servers.failures("plain", "request_refused") == 0


def test_a_job_under_suspicion_is_shown_until_it_is_given_up_and_then_as_a_killer() -> None:
    servers, shown = Servers(), set()
    servers.simulation.send([SimulatedJob("killer", takes_s=9.0, kills_after_s=1.0)])
    for _ in range(600):
        servers.simulation.run(1.0)
        names = "alphaloop_requests_alone", "alphaloop_requests_killed_servers_total"
        shown.add(tuple(map(servers.registry.get_sample_value, names)))
    assert shown == {(0, 0), (1, 0), (0, 1)}
    assert sum(servers.failures(endpoint.name, "reply_cut") or 0 for endpoint in ENDPOINTS) == 4
    assert servers.registry.get_sample_value("alphaloop_requests_waiting_for_route") == 2


def test_the_load_of_others_is_shown_while_a_server_tells_it() -> None:
    servers = Servers()

    def shown(name: str) -> list[float | None]:
        labels = [{"endpoint": one, "drafter": "" if one == "plain" else one} for one in ("plain", "ngram")]
        return [servers.registry.get_sample_value(f"alphaloop_endpoint_{name}", one) for one in labels]

    assert (shown("whole_load_known"), shown("others_in_flight")) == ([0, 0], [None, None])
    servers.fleet.members["ngram"].places.reported(Present(7, 0), 2)
    assert (shown("whole_load_known"), shown("others_in_flight")) == ([0, 1], [None, 5])
    servers.simulation.clock.pass_s(10.0)
    assert (shown("whole_load_known"), shown("others_in_flight")) == ([0, 0], [None, None])
