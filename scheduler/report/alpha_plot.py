"""The plot of acceptance by task, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from scheduler.report.data import TaskLine
from scheduler.report.drawing import BLUE, GREY, PAPER, STYLE, WIDTH_IN, bare, short, svg


def alpha_plot(tasks: Sequence[TaskLine]) -> str | None:
    """α_1 by task with its interval, best on top; None where nothing was measured. Filled: most rounds drafted."""
    measured = sorted(
        ((line, line.alpha_1) for line in tasks if line.alpha_1), key=lambda pair: (pair[1].mean, pair[0].task)
    )
    if not measured:
        return None
    with rc_context({**STYLE, "svg.hashsalt": "alpha"}):
        figure = Figure(figsize=(WIDTH_IN, 0.75 + 0.3 * len(measured)), layout="constrained")
        axes = figure.subplots()
        for y, (line, alpha) in enumerate(measured):
            is_on = line.done is not None and (line.done.drafted_share or 0) > 0.5
            colour = BLUE if is_on else GREY
            axes.plot([alpha.low, alpha.high], [y, y], color=colour, linewidth=2.4, solid_capstyle="round", alpha=0.45)
            inside = colour if is_on else PAPER
            axes.plot([alpha.mean], [y], marker="o", markersize=6.5, color=colour, markerfacecolor=inside)
        axes.set_yticks(range(len(measured)), [short(line.task, 22) for line, _ in measured])
        axes.set_ylim(-0.6, len(measured) - 0.4)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_xlabel("first drafted tokens accepted, 95 %")
        bare(axes, grid="x")
        means = "; ".join(f"{line.task} {alpha.mean:.2f}" for line, alpha in reversed(measured))
        return svg(figure, "alpha", f"Acceptance of the first drafted token by task: {means}")
