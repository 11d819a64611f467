"""The scalers' queries over what the metrics showed in a simulated day, by Prometheus's own tool.

`devices_needed.json` is what `python -m benchmarks.week.devices_needed --days 1 --series` wrote, with a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.kubernetes.kustomize import Resource
from tests.kubernetes.test_against_product import EXAMPLE, TARGETS, one
from tests.test_alerts import promtool

RECORDED: Final = json.loads((Path(__file__).parent / "devices_needed.json").read_text(encoding="utf-8"))
_NEEDED: Final = "alphaloop_scheduler_devices_needed"
_LAG: Final = "alphaloop_scheduler_kafka_lag"


def query_of(resources: Sequence[Resource], name: str) -> str:
    (devices,) = (
        trigger
        for trigger in one(resources, "ScaledObject", name)["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    )
    return str(devices["metadata"]["query"])


def values(numbers: Sequence[float | None]) -> str:
    """As promtool takes them: a metric that is not shown any more is stale."""
    return " ".join("stale" if number is None else f"{number:g}" for number in numbers)


def series(target: str, tasks: Mapping[str, str]) -> list[dict[str, str]]:
    """What two schedulers showed, of which one leads. `tasks`: the recorded one that each has the lag of."""
    seconds = [{"series": f'{_NEEDED}{{instance="a", target="{target}"}}', "values": values(RECORDED["needed"])}]
    for instance in ("a", "b"):
        for task, recorded in tasks.items():
            lag = [by_task.get(recorded, 0) for by_task in RECORDED["lag"]]
            seconds.append({"series": f'{_LAG}{{instance="{instance}", task="{task}"}}', "values": values(lag)})
    return seconds


@pytest.mark.parametrize(
    ("name", "target", "tasks", "jobs_of_a_worker"),
    [
        pytest.param("the only target", "smollm2", {"chat": "chat", "code": "code", "rag": "rag"}, 100, id="one"),
        pytest.param("worker", "my-target", {"chat": "chat", "code": "code"}, 100, id="default"),
        pytest.param("worker-large", "large", {"legal": "rag"}, 20, id="large"),
    ],
)
def test_a_scaler_gets_what_is_needed_and_while_that_is_not_known_workers_by_lag(
    name: str, target: str, tasks: Mapping[str, str], jobs_of_a_worker: int, tmp_path: Path
) -> None:
    query = query_of(EXAMPLE, "worker") if name == "the only target" else query_of(TARGETS, name)
    others = [] if name == "the only target" else [{"series": f'{_NEEDED}{{target="another"}}', "values": "9x300"}]
    expected = []
    for number, needed in enumerate(RECORDED["needed"]):
        lag = sum(RECORDED["lag"][number].get(recorded, 0) for recorded in tasks.values())
        expected.append(math.ceil(lag / jobs_of_a_worker) if needed is None else needed)
    asked: list[dict[str, Any]] = [
        {"expr": query, "eval_time": f"{5 * number}m", "exp_samples": [{"labels": "{}", "value": value}]}
        for number, value in enumerate(expected)
    ]
    case = {
        "rule_files": [],
        "evaluation_interval": "5m",
        "tests": [
            {"interval": "5m", "input_series": [*series(target, tasks), *others], "promql_expr_test": asked},
            # A scheduler that is away is no scheduler that needs none.
            {"interval": "5m", "input_series": [], "promql_expr_test": [{"expr": query, "eval_time": "5m"}]},
        ],
    }
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump(case, width=1000), encoding="utf-8")
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert None in RECORDED["needed"]
    assert len({*expected}) > 2
