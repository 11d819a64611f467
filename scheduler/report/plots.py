"""The report's plots as SVG text: same report, same bytes; no state outside the figure."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from scheduler.report.data import Estimate, HistoryPoint, TaskLine

INK: Final = "#1f2933"
MUTED: Final = "#66727f"
GRID: Final = "#e3e8ed"
BLUE: Final = "#1b6ac9"
GREY: Final = "#8a97a5"
PAPER: Final = "#ffffff"
#: The page's variables for these colours, so that a plot is light or dark with its page.
VARIABLES: Final = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    BLUE: "--blue",
    GREY: "--grey",
    PAPER: "--paper",
}
MAX_PANELS: Final = 12
WIDTH_IN: Final = 4.7  # narrow, so that the letters stay readable on a phone

STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 9.0,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.unicode_minus": False,
}


def alpha_plot(tasks: Sequence[TaskLine]) -> str | None:
    """α_1 by task with its interval, best on top; None where nothing was measured. Filled: speculation is on."""
    measured = sorted(
        ((line, line.alpha_1) for line in tasks if line.alpha_1), key=lambda pair: (pair[1].mean, pair[0].task)
    )
    if not measured:
        return None
    with rc_context({**STYLE, "svg.hashsalt": "alpha"}):
        figure = Figure(figsize=(WIDTH_IN, 0.75 + 0.3 * len(measured)), layout="constrained")
        axes = figure.subplots()
        for y, (line, alpha) in enumerate(measured):
            is_on = line.mode == "speculative"
            colour = BLUE if is_on else GREY
            axes.plot([alpha.low, alpha.high], [y, y], color=colour, linewidth=2.4, solid_capstyle="round", alpha=0.45)
            inside = colour if is_on else PAPER
            axes.plot([alpha.mean], [y], marker="o", markersize=6.5, color=colour, markerfacecolor=inside)
        axes.set_yticks(range(len(measured)), [_short(line.task, 22) for line, _ in measured])
        axes.set_ylim(-0.6, len(measured) - 0.4)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_xlabel("share of first drafted tokens accepted, 95 % interval")
        _bare(axes, grid="x")
        means = "; ".join(f"{line.task} {alpha.mean:.2f}" for line, alpha in reversed(measured))
        return _svg(figure, "alpha", f"Acceptance of the first drafted token by task: {means}")


def history_plot(history: Mapping[str, Sequence[HistoryPoint]]) -> str | None:
    """α_1 over time, a panel a task, those with most jobs first; None without history."""
    busiest = sorted(history, key=lambda task: (-sum(p.num_jobs for p in history[task]), task))[:MAX_PANELS]
    if not busiest:
        return None
    columns = min(3, len(busiest))
    rows = -(-len(busiest) // columns)
    with rc_context({**STYLE, "svg.hashsalt": "history"}):
        figure = Figure(figsize=(WIDTH_IN, 0.35 + 1.15 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        panels = [axes for row in grid for axes in row]
        for axes in panels[len(busiest) :]:
            axes.set_visible(False)
        starts = [p.start for task in busiest for p in history[task]]
        for axes, task in zip(panels, busiest, strict=False):
            _panel(axes, task, history[task])
        _time_axis(panels[0], min(starts), max(starts))
        for axes in panels[max(0, len(busiest) - columns) : len(busiest)]:
            axes.tick_params(labelbottom=True)
            for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=False):
                label.set_horizontalalignment(side)
        return _svg(figure, "history", f"Acceptance of the first drafted token over time for {', '.join(busiest)}")


def _panel(axes: Axes, task: str, points: Sequence[HistoryPoint]) -> None:
    x = [_day(p.start) for p in points]
    bounds: list[Estimate] = [p.alpha_1 for p in points]
    if len(points) > 1:
        axes.fill_between(x, [b.low for b in bounds], [b.high for b in bounds], color=BLUE, alpha=0.14, linewidth=0)
    else:
        axes.plot([x[0], x[0]], [bounds[0].low, bounds[0].high], color=BLUE, alpha=0.4, linewidth=2)
    axes.plot(x, [b.mean for b in bounds], color=BLUE, linewidth=1.4, marker="o", markersize=2.6)
    axes.set_title(_short(task, 18), loc="left", pad=3)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
    _bare(axes, grid="y")


def _time_axis(axes: Axes, first: datetime, last: datetime) -> None:
    """Room on both sides, and a label at either end, in UTC."""
    pad = (last - first) * 0.12 or timedelta(minutes=1)
    axes.set_xlim(_day(first - pad), _day(last + pad))
    form = "%d %b" if last - first > timedelta(days=1) else "%H:%M"
    ends = [first, last] if last > first else [first]
    axes.set_xticks([_day(at) for at in ends], [at.strftime(form) for at in ends])


def _short(name: str, num_chars: int) -> str:
    return name if len(name) <= num_chars else name[: num_chars - 1] + "…"


def _day(at: datetime) -> float:
    """Days since 1970, the unit of matplotlib."""
    return at.timestamp() / 86_400


def _bare(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if grid == "x" else "y", color=GRID, linewidth=0.8)


def _svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an SVG element; its ids begin with `name`, because two plots share a page."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub("|".join(VARIABLES), lambda found: f"var({VARIABLES[found[0]]})", svg)
    text = escape(alt, quote=True)
    return svg.replace("<svg", f'<svg role="img" aria-label="{text}"', 1).strip()
