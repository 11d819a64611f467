"""A picture as SVG: the goodput of every rule beside the oracle's."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.policy.report import Scores, best_static, over_seeds
from benchmarks.policy.scenario import Scenario

INK: Final = "#1f2933"
MUTED: Final = "#66727f"
GRID: Final = "#e3e8ed"
#: Colours that remain apart for most colour-blind readers; ours is the only dark one.
COLOURS: Final = {
    "ours": "#1b3a8c",
    "blind_oracle": "#8a8a2b",
    "best static": "#8a97a5",
    "vanilla": "#c9d1d9",
}
LABELS: Final = {"blind_oracle": "blind oracle"}
MARKERS: Final = dict(zip(COLOURS, "oXP|", strict=True))
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "policy",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 8.5,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.unicode_minus": False,
}


def write_plot(folder: Path, scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> Path:
    """Write it; the same scores give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "policy-goodput.svg"
    path.write_text(goodput_plot(scenarios, scores), encoding="utf-8")
    return path


def goodput_plot(scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> str:
    """A row a scenario, a mark a rule: goodput over the oracle's after subtracting the stated budget."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.0 + 0.42 * len(scenarios)), layout="constrained")
        axes = figure.subplots()
        rows, named = list(reversed(scenarios)), set[str]()
        for y, scenario in enumerate(rows):
            for name, rule in _lines(scores[scenario.name]).items():
                ratio = over_seeds(scores[scenario.name], rule, lambda s: s.of_oracle_net)
                size = 7 if name == "ours" else 5
                axes.plot([ratio.low, ratio.high], [y, y], color=COLOURS[name], linewidth=1.2)
                axes.plot(
                    [ratio.mean],
                    [y],
                    MARKERS[name],
                    color=COLOURS[name],
                    markersize=size,
                    zorder=3 + (name == "ours"),
                    label=None if name in named else LABELS.get(name, name),
                    markeredgewidth=1.6 if name == "vanilla" else 0,
                )
                named.add(name)
        axes.set_yticks(range(len(rows)), [scenario.name for scenario in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.axvline(1.0, color=MUTED, linewidth=0.8)
        axes.set_xlabel("goodput over the oracle's, less the stated budget; mean over seeds with 95 % bounds")
        _bare(axes)
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        return _svg(figure, "Goodput of each rule over the oracle's, by scenario")


def _lines(scores: Scores) -> dict[str, str]:
    """Name in the legend → rule, those that played."""
    found = {name: name for name in COLOURS if name in scores[0]}
    if best := best_static(scores):
        found["best static"] = best
    return {name: found[name] for name in COLOURS if name in found}


def _bare(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="both", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _svg(figure: Figure, title: str) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.patch.set_facecolor("white")
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return out.getvalue()
