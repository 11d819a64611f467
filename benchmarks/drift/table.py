"""The results as tables: alphaloop beside each family of detectors, with the setting that serves best."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.drift.contest import RUN_LENGTHS
from benchmarks.drift.contestants import OURS

Result = dict[str, Any]
Cell = tuple[str, int, float]


def family_of(name: str) -> str:
    """A detector whatever its settings."""
    return name.split(" ")[0].rstrip(",")


def decisive(results: list[Result]) -> list[Result]:
    """At the run length that decides."""
    return [one for one in results if one["wanted"] == RUN_LENGTHS[-1]]


def cell_of(result: Result) -> Cell:
    """Condition, speed and size."""
    return result["condition"], result["over"], result["size"]


def best_for_change(results: list[Result], cell: Cell, family: str) -> Result:
    """With the setting of a family that is soonest for this very change: a choice with hindsight."""
    its = [one for one in results if cell_of(one) == cell and family_of(one["contestant"]) == family]
    return min(its, key=lambda one: float(one["mean_delay"]))


def best_for_condition(results: list[Result], cell: Cell, family: str) -> Result:
    """With the one setting of a family that serves all changes of the condition best: the least mean log delay."""
    logs: dict[str, float] = {}
    for one in results:
        if one["condition"] == cell[0] and family_of(one["contestant"]) == family:
            logs[one["contestant"]] = logs.get(one["contestant"], 0.0) + math.log(one["mean_delay"])
    name = min(logs, key=lambda contestant: logs[contestant])
    return next(one for one in results if cell_of(one) == cell and one["contestant"] == name)


def lost(results: list[Result], *, with_hindsight: bool) -> list[str]:
    """Where a rival was sooner, and by how many jobs (95 %, paired)."""
    return [
        f"{one['contestant']}: {one['condition']}, {one['size']:.2f} over {one['over']}, sooner by "
        f"{-one['sooner_by']:.1f} ± {1.96 * one['sooner_error']:.1f} jobs"
        for row in rows(results, with_hindsight=with_hindsight)
        for one in row
        if one["sooner_by"] < 0
    ]


def rows(results: list[Result], *, with_hindsight: bool) -> list[list[Result]]:
    """For every change, one result of each family."""
    its = decisive(results)
    best = best_for_change if with_hindsight else best_for_condition
    families = list(dict.fromkeys(family_of(one["contestant"]) for one in its))
    return [[best(its, cell, family) for family in families] for cell in dict.fromkeys(cell_of(one) for one in its)]


def table(results: list[Result], *, with_hindsight: bool) -> str:
    """In Markdown: mean delays in jobs with their 95 % half-widths, and the settings."""
    found = rows(results, with_hindsight=with_hindsight)
    names = [OURS if one["contestant"] == OURS else family_of(one["contestant"]) for one in found[0]]
    lines = ["| condition | fall | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for row in found:
        condition, over, size = cell_of(row[0])
        fall = f"{size:.2f} {'at once' if over == 0 else f'over {over}'}".removeprefix("0")
        lines.append(f"| {condition} | {fall} | " + " | ".join(shown(one) for one in row) + " |")
    return "\n".join(lines)


def shown(result: Result) -> str:
    """Mean delay, how many were missed, and which setting."""
    setting = result["contestant"].partition(" ")[2]
    missed = f", {result['num_missed']} missed" if result["num_missed"] else ""
    return f"{result['mean_delay']:.0f} ± {1.96 * result['error']:.0f}{missed}" + (f" ({setting})" if setting else "")


def run_lengths(results: list[Result]) -> str:
    """In Markdown: the run length that alphaloop needs for the wanted one, by condition."""
    lines = ["| condition | told | measured | 95 % |", "|---|---|---|---|"]
    told = {(one["condition"], one["wanted"]): one for one in results if one["contestant"] == OURS}
    for (condition, _), one in told.items():
        its = one["run_length"]
        lines.append(
            f"| {condition} | {math.exp(one['strength']):,.0f} | {its['jobs']:,.0f} | {its['low']:,.0f} to "
            f"{its['high']:,.0f} ({its['num_alarms']} alarms) |"
        )
    return "\n".join(lines)
