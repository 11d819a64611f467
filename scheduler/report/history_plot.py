"""The plot of acceptance over time, traffic against probes, as SVG text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scheduler.report.data import HistoryPoint, TaskHistory
from scheduler.report.drawing import BLUE, GREEN, MUTED, STYLE, WIDTH_IN, bare, short, svg

MAX_PANELS: Final = 12
COLUMNS: Final = 2


def history_plot(history: Mapping[str, TaskHistory]) -> str | None:
    """α_1 over time, a panel a task, those with most jobs first; None without history.

    Traffic is a line with a band, broken where no job was decoded; probes are diamonds; a dashed line stands where a
    revision changed.
    """
    busiest = sorted(history, key=lambda task: (-sum(p.num_jobs for p in history[task].traffic), task))[:MAX_PANELS]
    if not busiest:
        return None
    columns = min(COLUMNS, len(busiest))
    rows = -(-len(busiest) // columns)
    with rc_context({**STYLE, "svg.hashsalt": "history"}):
        figure = Figure(figsize=(WIDTH_IN, 0.35 + 1.2 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        panels = [axes for row in grid for axes in row]
        for axes in panels[len(busiest) :]:
            axes.set_visible(False)
        times = [at for task in busiest for at in _times(history[task])]
        for axes, task in zip(panels, busiest, strict=False):
            _panel(axes, task, history[task])
        _time_axis(panels[0], min(times), max(times))
        for axes in panels[max(0, len(busiest) - columns) : len(busiest)]:
            axes.tick_params(labelbottom=True)
            for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=False):
                label.set_horizontalalignment(side)
        return svg(figure, "history", f"Acceptance of the first drafted token over time: {_told(history, busiest)}")


def stretches(points: Sequence[HistoryPoint], step: timedelta) -> list[list[HistoryPoint]]:
    """Points in a row without a gap: each begins where the one before it ends."""
    found = [[point] for point in points[:1]]
    for before, point in pairwise(points):
        if point.start - before.start > step:
            found.append([])
        found[-1].append(point)
    return found


def _panel(axes: Axes, task: str, history: TaskHistory) -> None:
    step = timedelta(seconds=history.step_s)
    for mark in history.revisions:
        axes.axvline(_day(mark.at), color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.text(_day(mark.at), 0.03, f" {', '.join(mark.changed)}", color=MUTED, fontsize=6.5, va="bottom")
    for points in stretches(history.traffic, step):
        # A point stands for the whole stretch that begins with it.
        x = [_day(p.start + step / 2) for p in points]
        low, high = [p.alpha_1.low for p in points], [p.alpha_1.high for p in points]
        if len(points) > 1:
            axes.fill_between(x, low, high, color=BLUE, alpha=0.16, linewidth=0)
        else:
            axes.vlines(x, low, high, color=BLUE, alpha=0.4, linewidth=2)
        axes.plot(x, [p.alpha_1.mean for p in points], color=BLUE, linewidth=1.4, marker="o", markersize=2.4)
    x = [_day(p.start) for p in history.probes]
    axes.vlines(x, [p.alpha_1.low for p in history.probes], [p.alpha_1.high for p in history.probes], color=GREEN)
    axes.plot(x, [p.alpha_1.mean for p in history.probes], color=GREEN, linestyle="", marker="D", markersize=3.6)
    axes.set_title(short(task, 26), loc="left", pad=3)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
    bare(axes, grid="y")


def _times(history: TaskHistory) -> Iterable[datetime]:
    for point in (*history.traffic, *history.probes):
        yield point.start
    for mark in history.revisions:
        yield mark.at


def _told(history: Mapping[str, TaskHistory], tasks: Sequence[str]) -> str:
    """What the plot shows, for those who cannot see it."""
    told = []
    for task in tasks:
        one = history[task]
        parts = [
            f"{name} {points[0].alpha_1.mean:.2f} to {points[-1].alpha_1.mean:.2f}"
            for name, points in (("traffic", one.traffic), ("probes", one.probes))
            if points
        ]
        parts += [f"{', '.join(mark.changed)} changed {mark.at:%Y-%m-%d %H:%M} UTC" for mark in one.revisions]
        told.append(f"{task}: {', '.join(parts)}")
    return "; ".join(told)


def _time_axis(axes: Axes, first: datetime, last: datetime) -> None:
    """Room on both sides, and a label at either end, in UTC."""
    pad = (last - first) * 0.08 or timedelta(minutes=1)
    axes.set_xlim(_day(first - pad), _day(last + pad))
    form = "%d %b" if last - first > timedelta(days=1) else "%H:%M"
    ends = [first, last] if last > first else [first]
    axes.set_xticks([_day(at) for at in ends], [at.strftime(form) for at in ends])


def _day(at: datetime) -> float:
    """Days since 1970, the unit of matplotlib."""
    return at.timestamp() / 86_400
