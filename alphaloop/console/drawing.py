"""Small plots as SVG, drawn at once: a page of fifty of them takes a millisecond. The colours are the style's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from alphaloop.store.task_figures import AcceptanceHour
from alphaloop.wording import share

HOURS: Final = 24
_HOUR: Final = timedelta(hours=1)
_SPARK: Final = (96.0, 24.0)
_PLOT: Final = (640.0, 200.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 8.0, 8.0, 22.0

Point = tuple[float, float]


def sparkline(hours: Sequence[AcceptanceHour], now: datetime | None = None) -> Markup:
    """α₁ of the last day by the hour, 0 at the bottom and 1 at the top; broken where nothing was tested."""
    shown = [(hour.begins, hour.alpha_1) for hour in hours if hour.alpha_1 is not None]
    if not shown:
        return Markup("")
    width, height = _SPARK
    begin = (now or datetime.now(UTC)).replace(minute=0, second=0, microsecond=0) - (HOURS - 1) * _HOUR

    def at(begins: datetime, alpha: float) -> Point:
        return 2 + (width - 4) * ((begins - begin) / _HOUR) / (HOURS - 1), 2 + (height - 4) * (1 - alpha)

    lines = [[at(*point) for point in part] for part in _stretches(shown, _HOUR)]
    drawn = Markup("").join(_line(line, "line") if len(line) > 1 else _dot(line[0], 1.6, "line") for line in lines)
    last = _dot(at(*shown[-1]), 2.2, "last")
    told = f"acceptance by the hour, {share(shown[0][1])} at first, {share(shown[-1][1])} at last"
    return Markup('<svg class="spark" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}{}</svg>').format(
        width, height, told, drawn, last
    )


def alpha_over_time(history: Mapping[str, Any]) -> Markup:
    """α₁ of traffic with its interval, of probes, and the moments at which something behind it changed.

    `history` is that of a task in the newest report's data: scheduler.report.data.TaskHistory as JSON.
    """
    step = timedelta(seconds=history["step_s"])
    traffic, probes = _points(history["traffic"], step / 2), _points(history["probes"], timedelta())
    marks = [(datetime.fromisoformat(mark["at"]), ", ".join(mark["changed"])) for mark in history["revisions"]]
    times = [at for at, *_ in (*traffic, *probes)] + [at for at, _ in marks]
    if not times:
        return Markup("")
    x, y = _scales(min(times), max(times))
    parts = [_grid(y), _time_labels(x, min(times), max(times))]
    for at, changed in marks:
        parts.append(_mark(x(at), changed))
    for stretch in _stretches([(at, (low, mean, high)) for at, low, mean, high in traffic], step):
        band = [(x(at), y(high)) for at, (_, _, high) in stretch]
        band += [(x(at), y(low)) for at, (low, _, _) in reversed(stretch)]
        middle = [(x(at), y(mean)) for at, (_, mean, _) in stretch]
        if len(stretch) > 1:
            parts += [Markup('<polygon class="band" points="{}"/>').format(_text(band)), _line(middle, "line")]
        else:
            parts.append(_line([band[0], band[1]], "whisker"))
        parts += [_dot(point, 2.2, "point") for point in middle]
    for at, low, mean, high in probes:
        parts += [_line([(x(at), y(low)), (x(at), y(high))], "whisker probe"), _dot((x(at), y(mean)), 3.4, "probe")]
    return Markup('<svg class="plot" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}</svg>').format(
        *_PLOT, _told(traffic, probes), Markup("").join(parts)
    )


def _points(points: Iterable[Mapping[str, Any]], middle: timedelta) -> list[tuple[datetime, float, float, float]]:
    """When, lower bound, mean, upper bound; a point of a stretch stands in its middle."""
    return [
        (datetime.fromisoformat(p["start"]) + middle, *(p["alpha_1"][name] for name in ("low", "mean", "high")))
        for p in points
    ]


def _stretches(points: Sequence[tuple[datetime, Any]], step: timedelta) -> list[list[tuple[datetime, Any]]]:
    """Points in a row without a gap."""
    found = [list(points[:1])] if points else []
    for before, point in pairwise(points):
        if point[0] - before[0] > step:
            found.append([])
        found[-1].append(point)
    return found


def _scales(first: datetime, last: datetime) -> tuple[Callable[[datetime], float], Callable[[float], float]]:
    width, height = _PLOT
    pad = (last - first) * 0.04 or timedelta(minutes=1)
    begin, length = first - pad, last - first + 2 * pad
    return (
        lambda at: _LEFT + (width - _LEFT - _RIGHT) * ((at - begin) / length),
        lambda share_: _TOP + (height - _TOP - _BOTTOM) * (1 - share_),
    )


def _grid(y: Callable[[float], float]) -> Markup:
    row = Markup('<line class="grid" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/><text x="{:g}" y="{:.1f}">{}</text>')
    rows = (0.0, 0.25, 0.5, 0.75, 1.0)
    return Markup("").join(
        row.format(_LEFT, _PLOT[0] - _RIGHT, y(v), y(v), 2, y(v) + 4, "1" if v == 1 else share(v)) for v in rows
    )


def _time_labels(x: Callable[[datetime], float], first: datetime, last: datetime) -> Markup:
    form = "%d %b" if last - first > timedelta(days=2) else "%d %b %H:%M"
    label = Markup('<text class="{}" x="{:.1f}" y="{:g}">{}</text>')
    y = _PLOT[1] - 5
    ends = [label.format("from", _LEFT, y, f"{first.astimezone(UTC):{form}}")]
    if last > first:
        ends.append(label.format("to", _PLOT[0] - _RIGHT, y, f"{last.astimezone(UTC):{form}}"))
    return Markup("").join(ends)


def _mark(x: float, changed: str) -> Markup:
    side, shift = ("to", -4) if x > _PLOT[0] * 0.8 else ("from", 4)
    return Markup(
        '<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1:g}" y2="{2:g}"/>'
        '<text class="{3}" x="{4:.1f}" y="{5:g}">{6}</text>'
    ).format(x, _TOP, _PLOT[1] - _BOTTOM, side, x + shift, _PLOT[1] - _BOTTOM - 5, changed)


def _line(points: Sequence[Point], name: str) -> Markup:
    return Markup('<polyline class="{}" points="{}"/>').format(name, _text(points))


def _dot(point: Point, radius: float, name: str) -> Markup:
    return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}"/>').format(name, *point, radius)


def _text(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _told(
    traffic: Sequence[tuple[datetime, float, float, float]], probes: Sequence[tuple[datetime, float, float, float]]
) -> str:
    """What the plot shows, for those who cannot see it."""
    parts = [
        f"{name} {share(points[0][2])} at first, {share(points[-1][2])} at last"
        for name, points in (("traffic", traffic), ("probes", probes))
        if points
    ]
    return "Acceptance of the first drafted token over time: " + "; ".join(parts)


FOR_TEMPLATES: Final[Mapping[str, Callable[..., Any]]] = {"sparkline": sparkline, "alpha_over_time": alpha_over_time}
