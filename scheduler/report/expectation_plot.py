"""The reliability plot: measured over expected speed-up by task, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scheduler.report.data import ExpectationLine
from scheduler.report.drawing import BLUE, GREY, INK, PAPER, STYLE, WIDTH_IN, bare, short, svg

#: Ratios that may stand at the axis; those within the range are labelled.
_TICKS: Final = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0)
_LEAST_RANGE: Final = math.log(1.25)
#: Labels closer than this share of the axis would touch.
_APART: Final = 0.09


def expectation_plot(lines: Sequence[ExpectationLine]) -> str | None:
    """A row for each task and drafter; None without a pair.

    The bar is what the intervals allowed, on average; each dot is a measurement over its expectation, filled where the
    interval held it.
    """
    if not lines:
        return None
    names = [line.task if _is_only(line, lines) else f"{line.task}, {line.drafter}" for line in lines]
    with rc_context({**STYLE, "svg.hashsalt": "expectations"}):
        figure = Figure(figsize=(WIDTH_IN, 0.75 + 0.3 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for y, line in enumerate(reversed(lines)):
            _row(axes, y, line)
        axes.axvline(0, color=INK, linewidth=0.9)
        _ratio_axis(axes, lines)
        axes.set_yticks(range(len(lines)), [short(name, 26) for name in reversed(names)])
        axes.set_ylim(-0.6, len(lines) - 0.4)
        axes.set_xlabel("measured over expected speed-up")
        bare(axes, grid="x")
        told = "; ".join(
            f"{name} {line.ratio:.2f}, {line.num_held} of {line.num_pairs} held"
            for name, line in zip(names, lines, strict=True)
        )
        return svg(figure, "expectations", f"Measured over expected speed-up by task: {told}")


def _is_only(line: ExpectationLine, lines: Sequence[ExpectationLine]) -> bool:
    return sum(line.task == other.task for other in lines) == 1


def _row(axes: Axes, y: int, line: ExpectationLine) -> None:
    low = fmean(math.log(point.expected.low / point.expected.mean) for point in line.points)
    high = fmean(math.log(point.expected.high / point.expected.mean) for point in line.points)
    axes.plot([low, high], [y, y], color=GREY, linewidth=7, solid_capstyle="butt", alpha=0.3)
    for point in line.points:
        at = math.log(point.measured.mean / point.expected.mean)
        inside = BLUE if point.is_held else PAPER
        axes.plot([at], [y], marker="o", markersize=4.6, color=BLUE, markerfacecolor=inside, linestyle="", alpha=0.8)


def _ratio_axis(axes: Axes, lines: Sequence[ExpectationLine]) -> None:
    """Logarithmic and symmetric about 1, so that half as fast and twice as fast are equally far."""
    points = [point for line in lines for point in line.points]
    ends = [
        math.log(edge / point.expected.mean)
        for point in points
        for edge in (point.expected.low, point.expected.high, point.measured.mean)
    ]
    reach = 1.1 * max(_LEAST_RANGE, *map(abs, ends))
    ticks: list[float] = []
    for ratio in sorted(_TICKS, key=lambda one: abs(math.log(one))):
        at = math.log(ratio)
        if abs(at) <= reach and all(abs(at - other) > 2 * reach * _APART for other in ticks):
            ticks.append(at)
    axes.set_xlim(-reach, reach)
    axes.set_xticks(ticks, [f"{math.exp(at):.2f}".rstrip("0").rstrip(".") for at in ticks])
