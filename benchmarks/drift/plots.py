"""The picture: mean delay against run length, a line a family of detectors, a panel for each condition and fall."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, ScalarFormatter

from benchmarks.drift.contest import RUN_LENGTHS
from benchmarks.drift.contestants import OURS
from benchmarks.drift.table import Result, best_for_change, cell_of, family_of

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
