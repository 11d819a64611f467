"""Two pictures as SVG: goodput beside the oracle's, and the time lost to it as jobs go by."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
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
    "epsilon_greedy": "#e08a1e",
    "alpha_thresholds": "#b0457b",
    "ema_tiers": "#2a9d8f",
    "survival": "#8b6fc9",
    "blind_oracle": "#8a8a2b",
    "best static": "#8a97a5",
    "vanilla": "#c9d1d9",
}
LABELS: Final = {
    "epsilon_greedy": "ε-greedy",
    "alpha_thresholds": "α thresholds",
    "ema_tiers": "moving-average tiers",
    "blind_oracle": "blind oracle",
}
MARKERS: Final = dict(zip(COLOURS, "oDs^vXP|", strict=True))
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
COLUMNS: Final = 3


def write_plots(folder: Path, scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> tuple[Path, ...]:
    """Write both; the same scores give the same bytes."""
    drawn = {"policy-goodput.svg": goodput_plot(scenarios, scores), "policy-regret.svg": regret_plot(scenarios, scores)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        (folder / name).write_text(svg, encoding="utf-8")
    return tuple(folder / name for name in drawn)


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
        _bare(axes, "both")
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        return _svg(figure, "Goodput of each rule over the oracle's, by scenario")


def regret_plot(scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> str:
    """A panel a scenario: time lost to the oracle so far, in per cent of the oracle's whole time."""
    rows = -(-len(scenarios) // COLUMNS)
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.6 + 1.55 * rows), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for axes in panels[len(scenarios) :]:
            axes.set_visible(False)
        for axes, scenario in zip(panels, scenarios, strict=False):
            _panel(axes, scenario, scores[scenario.name])
        # Not every rule plays in every panel.
        named = {
            label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=4, frameon=False)
        figure.supxlabel("share of the stream: of its batches, or with slots of its tokens", fontsize=8.5, color=MUTED)
        figure.supylabel("time lost to the oracle, % of its whole time", fontsize=8.5, color=MUTED)
        return _svg(figure, "Time lost to the oracle as a stream goes by, by scenario and rule")


def _panel(axes: Axes, scenario: Scenario, scores: Scores) -> None:
    highest = 0.0
    for name, rule in _lines(scores).items():
        # Every third moment: the file is a quarter of a megabyte as it is.
        lost = 100 * np.array([seed[rule].regret[2::3] for seed in scores if rule in seed])
        mean = lost.mean(axis=0)
        x = np.linspace(0, 1, len(mean) + 1)
        width = 2.0 if name == "ours" else 1.1
        axes.plot(
            x,
            [0, *mean],
            color=COLOURS[name],
            linewidth=width,
            label=LABELS.get(name, name),
            zorder=3 + (name == "ours"),
            linestyle=":" if name == "vanilla" else "-",
        )
        if name == "ours":
            low, high = np.percentile(lost, [2.5, 97.5], axis=0)
            axes.fill_between(x, [0, *low], [0, *high], color=COLOURS[name], alpha=0.15, linewidth=0)
        if name != "vanilla":
            highest = max(highest, float(mean[-1]))
    axes.set_title(scenario.name, loc="left", pad=3)
    # Vanilla may leave its panel: what lies between the others would not be seen otherwise.
    axes.set_ylim(min(-0.5, -0.04 * highest), 1.12 * highest)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
    _bare(axes, "y")


def _lines(scores: Scores) -> dict[str, str]:
    """Name in the legend → rule, those that played."""
    found = {name: name for name in COLOURS if name in scores[0]}
    if best := best_static(scores):
        found["best static"] = best
    return {name: found[name] for name in COLOURS if name in found}


def _bare(axes: Axes, grid: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _svg(figure: Figure, title: str) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.patch.set_facecolor("white")
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return out.getvalue()
