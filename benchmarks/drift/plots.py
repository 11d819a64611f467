"""The curves: mean delay by size of the fall, a line a contestant, a panel a condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.drift.contestants import OURS

_STYLE: Final = {OURS: {"color": "#c1272d", "linewidth": 2.5, "zorder": 3}}


def draw_curves(results: list[dict[str, Any]], path: Path) -> None:
    """One row of panels for abrupt falls and one for gradual ones."""
    conditions = list(dict.fromkeys(one["condition"] for one in results))
    overs = sorted({one["over"] for one in results})
    figure = Figure(figsize=(3.4 * len(conditions), 3.2 * len(overs)), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(len(overs), len(conditions), squeeze=False, sharey="row")
    for row, over in enumerate(overs):
        for column, condition in enumerate(conditions):
            panel = panels[row][column]
            its = [one for one in results if (one["condition"], one["over"]) == (condition, over)]
            for name in dict.fromkeys(one["contestant"] for one in its):
                line = sorted((one["size"], one["mean_delay"]) for one in its if one["contestant"] == name)
                panel.plot(*zip(*line, strict=True), marker="o", label=name, **_STYLE.get(name, {"linewidth": 1}))
            panel.set_yscale("log")
            panel.set_title(f"{condition}, {'at once' if over == 0 else f'over {over} jobs'}", fontsize=9)
            panel.set_xlabel("fall of α")
        panels[row][0].set_ylabel("mean delay in jobs")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.savefig(path, metadata={"Date": None})
