"""Asks every place that shows a task's figures, as a person would: commands, the view, the metrics."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from alphaloop.cli.children import child_command
from alphaloop.store.database import Database

#: Figures that must be equal; the view's columns have these names, the others are turned into them.
FIGURES: Final = ("speedup", "low", "high", "num_blocks", "min_num_draft_tokens", "max_num_draft_tokens")
_TIMEOUT_S: Final = 120.0
#: A command prints what Postgres stores, a metric is a float of the same: only the last digits may differ.
_SAME: Final = 1e-9
_VIEW: Final = text(
    "SELECT task, speedup, speedup_low AS low, speedup_high AS high, num_blocks, min_num_draft_tokens, "
    "max_num_draft_tokens FROM task_speedup_now"
)
_METRICS: Final = {
    "ratio": "speedup",
    "low": "low",
    "high": "high",
    "blocks": "num_blocks",
    "min_draft_tokens": "min_num_draft_tokens",
    "max_draft_tokens": "max_num_draft_tokens",
}

#: By task, then by figure; a figure that is not shown is missing or None.
Shown = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one place shows."""

    place: str
    by_task: Shown


def ask_everywhere(
    environment: Mapping[str, str], database: Database, metrics: str, tasks: Sequence[str]
) -> list[Asked]:
    """What the view, status, report, explain and the scheduler's metrics show of these tasks."""
    status = {line["task"]: _bounds(line["measured"]) for line in _command(environment, "status", "--json")["tasks"]}
    report = {line["task"]: _bounds(line["measured"]) for line in _command(environment, "report", "--json")["tasks"]}
    explained = {
        task: _bounds(_command(environment, "explain", task, "--json")["measured"]["speedup"]) for task in tasks
    }
    return [
        Asked("view", _view(database)),
        Asked("status", status),
        Asked("report", report),
        Asked("explain", explained),
        Asked("metrics", _scraped(metrics)),
    ]


def differences(asked: Sequence[Asked], tasks: Sequence[str]) -> list[str]:
    """Every figure on which two places do not agree, as a sentence without anything else."""
    first, *others = asked
    found = []
    for task in tasks:
        for name in FIGURES:
            truth = first.by_task.get(task, {}).get(name)
            for other in others:
                told = other.by_task.get(task, {}).get(name)
                if not _is_same(truth, told):
                    found.append(f"{task}, {name}: {first.place} {truth}, {other.place} {told}")
    return found


def _is_same(one: float | None, another: float | None) -> bool:
    if one is None or another is None:
        return one is another
    return abs(one - another) <= _SAME * max(abs(one), abs(another))


def _command(environment: Mapping[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        child_command("alphaloop.cli", arguments),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"alphaloop {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def _bounds(measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """A measured speed-up as the commands print it, under the names of `FIGURES`."""
    if measured is None:
        return {}
    bounds = measured["speedup"] or {}
    if not isinstance(bounds, Mapping):
        bounds = dict(zip(("mean", "low", "high"), bounds, strict=True))
    return {
        "speedup": bounds.get("mean"),
        "low": bounds.get("low"),
        "high": bounds.get("high"),
        **{name: measured[name] for name in FIGURES[3:]},
    }


def _view(database: Database) -> Shown:
    with database.begin() as connection:
        return {row["task"]: dict(row) for row in connection.execute(_VIEW).mappings()}


def _scraped(address: str) -> Shown:
    with urllib.request.urlopen(f"{address}/metrics", timeout=_TIMEOUT_S) as answer:
        page = answer.read().decode()
    prefix = "alphaloop_scheduler_speedup_"
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(page):
        name = _METRICS.get(family.name.removeprefix(prefix)) if family.name.startswith(prefix) else None
        if name is not None:
            for sample in family.samples:
                found.setdefault(sample.labels["task"], {})[name] = sample.value
    return found
