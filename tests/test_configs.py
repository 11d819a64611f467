"""Alerts and dashboard ask for metrics that exist, with labels they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry

from scheduler.metrics import KafkaLag, SchedulerMetrics
from tests.fakes import FakeEngine
from worker.metrics import WorkerMetrics

ROOT: Final = Path(__file__).resolve().parents[1]
PROMETHEUS: Final = ROOT / "configs" / "prometheus"
GRAFANA: Final = ROOT / "configs" / "grafana"
#: Labels that Prometheus adds when it scrapes, or a histogram for its buckets.
ADDED: Final = {"job", "instance", "le"}


def load(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def rules() -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((GRAFANA / "dashboards" / "alphaloop.json").read_text(encoding="utf-8")))


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["label"], variable["query"]["query"]


def series(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Labels of every series by its name, `_total`, `_bucket` and their like included."""
    found: dict[str, set[str]] = {}
    for collector, names in registry._collector_to_names.items():
        families = [collector] if hasattr(collector, "_labelnames") else collector.collect()
        for family in families:
            labels = set(getattr(family, "_labelnames", ()))
            own = getattr(family, "name", "")
            shown = (own, f"{own}_total") if getattr(family, "type", "") == "counter" else (own,)
            found |= {name: labels for name in (*names, *shown) if name.startswith(own)}
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """What both processes export."""
    worker = WorkerMetrics()
    worker.watch_engine(FakeEngine())

    class Idle:
        num_in_flight = distance = poll_age_s = 0

    worker.watch(Idle(), lambda: 0)  # type: ignore[arg-type]
    scheduler = SchedulerMetrics()
    scheduler.registry.register(KafkaLag(dict))
    # What a process says about itself is on both registries, and is found by a scrape only.
    both = set.intersection(*({one.name for one in r.collect()} for r in (worker.registry, scheduler.registry)))
    assert both == {name for name in both if name.startswith("process_")}
    return {**series(worker.registry), **series(scheduler.registry), "up": set()} | {name: set() for name in both}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_and_label_exists(where: str, expression: str, known: dict[str, set[str]]) -> None:
    names = set(re.findall(r"\b(alphaloop_\w+|process_\w+|up)\b", expression))
    assert names, f"{where} asks for nothing of ours"
    assert names <= set(known), f"{where}: no such metric"
    labels = set().union(*(known[name] for name in names)) | ADDED
    asked = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    asked |= {label for group in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", group)}
    asked |= set(re.findall(r"label_values\(.*, (\w+)\)", expression))
    assert asked <= labels, f"{where}: no such label"
    # A label that one metric has is not there for another of the same expression.
    for name, group in re.findall(r"\b(alphaloop_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*[=!]", group)) <= known[name] | ADDED, f"{where}: {name} has no such label"
    assert expression.count("(") == expression.count(")")


def test_a_counter_is_asked_for_its_rate() -> None:
    for where, expression in expressions():
        for name in re.findall(r"\b(alphaloop_\w+_(?:total|bucket|sum|count))\b", expression):
            assert re.search(rf"(rate|increase|label_values)\({name}\b", expression), f"{where}: {name} only ever grows"


def test_every_alert_has_a_runbook_that_exists() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == rule["alert"].lower()
        assert f"\n## {rule['alert']}\n" in (ROOT / path).read_text(encoding="utf-8")


def test_prometheus_scrapes_the_services_of_the_compose_file() -> None:
    config = load(PROMETHEUS / "prometheus.yml")
    assert all((PROMETHEUS / name).is_file() for name in config["rule_files"])
    services = load(ROOT / "docker-compose.yml")["services"]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (worker,) = jobs["alphaloop-worker"]["dns_sd_configs"]
    ((scheduler,),) = [part["targets"] for part in jobs["alphaloop-scheduler"]["static_configs"]]
    assert set(worker["names"]) | {scheduler.split(":")[0]} == {"worker", "scheduler"} <= set(services)
    assert (worker["port"], scheduler.split(":")[1]) == (9464, "9465")


def test_grafana_is_provisioned_with_the_dashboard() -> None:
    (source,) = load(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    (provider,) = load(GRAFANA / "provisioning" / "dashboards" / "alphaloop.yml")["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    panels = dashboard()["panels"]
    (variable,) = (one for one in dashboard()["templating"]["list"] if one["type"] == "datasource")
    assert variable["query"] == source["type"]
    assert {panel["datasource"]["uid"] for panel in panels} == {f"${{{variable['name']}}}"}
    assert source["isDefault"] is True, "what the variable begins with"
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [(x, y) for p in panels for x in _span(p, "x", "w") for y in _span(p, "y", "h")]
    assert len(cells) == len(set(cells)), "panels overlap"


def test_the_dashboard_is_narrowed_to_tasks_targets_and_workers() -> None:
    """Wherever the metrics can be: no panel shows another task or worker beside the chosen ones."""
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "task", "target", "worker"]
    assert all(one["multi"] and one["includeAll"] for one in variables.values() if one["type"] == "query")
    assert "$target" in variables["worker"]["query"]["query"]
    metrics = {**series(WorkerMetrics().registry), **series(SchedulerMetrics().registry)}
    narrowed = {"alphaloop_scheduler_kafka_lag"}  # made when a scheduler stays
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for name, group in re.findall(r"\b(alphaloop_\w+)\b(?:\{([^}]*)\})?", target["expr"]):
                is_of_a_worker = not name.startswith("alphaloop_scheduler_")
                assert ('instance=~"$worker"' in group) == is_of_a_worker, panel["title"]
                has_task = "task" in metrics.get(name, ()) or name in narrowed
                assert ('task=~"$task"' in group) == has_task, panel["title"]


def test_the_dashboard_shows_what_was_measured_where_jobs_wait_and_the_servers() -> None:
    asked = " ".join(expression for _, expression in expressions())
    for name in ("ratio", "low", "high"):
        assert f"alphaloop_scheduler_speedup_{name}" in asked
    assert "alphaloop_scheduler_kafka_lag" in asked
    # `waiting` is what no worker has claimed, on every screen: what a worker has taken has another name.
    taken = [one["title"] for one in dashboard()["panels"] if "num_requests_waiting" in json.dumps(one)]
    assert taken == ["Read ahead"]
    assert {"in_flight", "limit", "state", "failures_total"} <= set(re.findall(r"alphaloop_endpoint_(\w+)", asked))


def _span(panel: dict[str, Any], start: str, size: str) -> range:
    position = panel["gridPos"]
    return range(position[start], position[start] + position[size])
