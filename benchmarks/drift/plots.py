"""The results as tables and pictures: alphaloop beside each family of detectors, with the setting that serves best."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, ScalarFormatter

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
    setting = result["contestant"].partition(" ")[2].removeprefix("means of ")
    missed = f", {result['num_missed']} missed" if result["num_missed"] else ""
    return f"{result['mean_delay']:.0f} ± {1.96 * result['error']:.0f}{missed}" + (f" ({setting})" if setting else "")


def run_lengths(results: list[Result]) -> str:
    """In Markdown: the run length that alphaloop has to be told for the wanted one, by condition."""
    lines = ["| condition | told | measured | 95 % |", "|---|---|---|---|"]
    told = {(one["condition"], one["wanted"]): one for one in results if one["contestant"] == OURS}
    for (condition, _), one in told.items():
        its = one["run_length"]
        lines.append(
            f"| {condition} | {math.exp(one['strength']):,.0f} | {its['jobs']:,.0f} | {its['low']:,.0f} to "
            f"{its['high']:,.0f} ({its['num_alarms']} alarms) |"
        )
    return "\n".join(lines)


#: Colours that are readable on white and on black paper.
INK: Final = "#768390"
COLOURS: Final = {
    OURS: "#d6336c",
    "Page-Hinkley": "#3b82c4",
    "ADWIN": "#2a9d8f",
    "HDDM_A": "#d9822b",
    "HDDM_W": "#8b6fc9",
    "KSWIN": "#8a8a2b",
}
MARKERS: Final = dict(zip(COLOURS, "os^Dvx", strict=True))
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "drift",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 8,
    "xtick.color": INK,
    "ytick.color": INK,
}
TICKS: Final = (10, 20, 50, 100, 200, 500, 1000, 2000, 4000)
SHOWN: Final = (0.05, 0.10, 0.20)


def draw(results: list[Result], folder: Path) -> None:
    """Write a picture for falls at once and one for gradual ones; the same results give the same bytes."""
    for over in sorted({one["over"] for one in results}):
        its = [one for one in results if one["over"] == over and one["size"] in SHOWN]
        name = "drift-delays.svg" if over == 0 else "drift-delays-gradual.svg"
        (folder / name).write_text(_picture(its), encoding="utf-8")


def _picture(results: list[Result]) -> str:
    conditions = list(dict.fromkeys(one["condition"] for one in results))
    with rc_context(STYLE):
        figure = Figure(figsize=(2.0 * len(conditions) + 0.6, 2.0 * len(SHOWN) + 0.5), layout="constrained")
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure)
        panels = figure.subplots(len(SHOWN), len(conditions), squeeze=False, sharex=True, sharey="row")
        for row, size in enumerate(SHOWN):
            for column, condition in enumerate(conditions):
                its = [one for one in results if (one["condition"], one["size"]) == (condition, size)]
                _panel(panels[row][column], its)
                if row == 0:
                    panels[row][column].set_title(condition)
            panels[row][0].set_ylabel(f"fall of {size:.2f}: jobs to the alarm")
        for panel in panels[-1]:
            panel.set_xlabel("jobs between false alarms")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()


def _panel(panel: Axes, results: list[Result]) -> None:
    panel.patch.set_alpha(0)
    for family in dict.fromkeys(family_of(one["contestant"]) for one in results):
        line = []
        for wanted in sorted({one["wanted"] for one in results}):
            its = [one for one in results if one["wanted"] == wanted]
            best = best_for_change(its, cell_of(its[0]), family)
            line.append((wanted, best["mean_delay"]))
        panel.plot(
            *zip(*line, strict=True), label=family, color=COLOURS[family], marker=MARKERS[family], markersize=4,
            linewidth=2 if family == OURS else 1, zorder=3 if family == OURS else 2,
        )  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(RUN_LENGTHS, [f"{length // 1000}k" for length in RUN_LENGTHS])
    panel.yaxis.set_major_locator(FixedLocator(TICKS))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.minorticks_off()
    panel.grid(color=INK, alpha=0.2, linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)
