"""What the report and the console draw and write with: plots as SVG, and the templates of pages.

Plots are drawn at once: a page of fifty of them takes a millisecond. Colours and letters are those of `style.css`, so
a plot is light or dark with its page. The same data give the same SVG. In templates, everything from outside is
escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from alphaloop.as_decoded import at_load, drafted_by_load, drafted_sentence, percent, setting
from alphaloop.experiment.wording import computed, control, draft_lengths, figure, load, ratio, why
from alphaloop.store.task_figures import AcceptanceHour
from alphaloop.wording import (
    acceptance_of,
    counted_apart,
    counts,
    harmless,
    how_many,
    minute,
    named,
    rate,
    sentence,
    share,
    share_with_interval,
    words,
)

HOURS: Final = 24
#: Panels of `alpha_of_tasks`.
MAX_PANELS: Final = 12
_HOUR: Final = timedelta(hours=1)
_SPARK: Final = (96.0, 24.0)
_ROW, _NAMES, _AXIS = 24.0, 150.0, 40.0  # of plots with a row a task: height of a row, room for names and for the axis
_WIDTH: Final = 480.0
_WORK: Final = (380.0, 210.0)  # a panel of arrivals: as wide as a phone shows it at the letters' own size
#: Ratios that may stand at the axis; those within the range are labelled.
_TICKS: Final = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0)
_LEAST_RANGE: Final = math.log(1.25)
#: Labels closer than this share of the axis would touch.
_APART: Final = 0.09

Point = tuple[float, float]


class Box(NamedTuple):
    """Where the axes of a plot are, in its own units."""

    left: float
    top: float
    right: float
    bottom: float


_PLOT: Final = Box(34.0, 8.0, 632.0, 178.0)


class RatioBar(NamedTuple):
    """Ratios of one task to what was expected: what the intervals allowed on average, and each ratio."""

    name: str
    low: float
    high: float
    dots: Sequence[tuple[float, bool]]  #: ratio, and whether it is filled


class FleetLine(NamedTuple):
    """A fleet's size: what it is called, the least and the most that it may be, and whether it is only expected."""

    name: str
    num_devices: int
    low: int
    high: int
    is_expected: bool


class WorkOverTime(NamedTuple):
    """Work that arrived, in full devices by steps of time, the fleets for it, and the window in which most of it came.

    A window that begins before the last step and ends after it is drawn to the end.
    """

    begins_at: datetime
    step: timedelta
    devices: Sequence[float]  #: a step each
    fleets: Sequence[FleetLine]
    window: tuple[datetime, timedelta, float]  #: begin, length, full devices
    window_name: str


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
    label = f"acceptance by the hour, {share(shown[0][1])} at first, {share(shown[-1][1])} at last"
    return _svg("spark", width, height, label, [drawn, last])


def alpha_over_time(history: Mapping[str, Any]) -> Markup:
    """α₁ of traffic with its interval, of probes, and the moments at which what decodes it changed.

    `history` is that of a task in the newest report's data: scheduler.report.data.TaskHistory as JSON.
    """
    times = _times(history)
    if not times:
        return Markup("")
    label = f"Acceptance of the first drafted token over time: {_course_label(history)}"
    return _svg("plot", 640, 200, label, [_course(history, _PLOT, min(times), max(times))])


def alpha_of_tasks(histories: Mapping[str, Mapping[str, Any]]) -> Markup | None:
    """`alpha_over_time` of several tasks at the same times, a panel each, those with most jobs first; None of none."""
    busiest = sorted(histories, key=lambda task: (-sum(p["num_jobs"] for p in histories[task]["traffic"]), task))
    shown = [task for task in busiest if _times(histories[task])][:MAX_PANELS]
    if not shown:
        return None
    times = [at for task in shown for at in _times(histories[task])]
    columns = min(2, len(shown))
    width, height = _WIDTH / columns, 130.0
    parts = []
    for number, task in enumerate(shown):
        left, top = width * (number % columns), height * (number // columns)
        box = Box(left + 34, top + 22, left + width - 10, top + height - 24)
        parts.append(_label("name", left + 2, top + 14, _short(task, 26)))
        parts.append(_course(histories[task], box, min(times), max(times)))
    label = "; ".join(f"{task}: {_course_label(histories[task])}" for task in shown)
    rows = -(-len(shown) // columns)
    return _svg("plot", _WIDTH, height * rows, f"Acceptance of the first drafted token over time: {label}", parts)


def ratios_by_task(bars: Sequence[RatioBar], axis: str, label: str) -> Markup | None:
    """Ratios on an axis that is logarithmic and symmetric about 1: half and twice are equally far; None of none."""
    if not bars:
        return None
    ends = [math.log(end) for bar in bars for end in (bar.low, bar.high, *(ratio for ratio, _ in bar.dots))]
    reach = 1.1 * max(_LEAST_RANGE, *map(abs, ends))
    ticks: list[tuple[float, str]] = []
    for tick in sorted(_TICKS, key=lambda tick: abs(math.log(tick))):
        at = math.log(tick)
        if abs(at) <= reach and all(abs(at - other) > 2 * reach * _APART for other, _ in ticks):
            ticks.append((at, f"{tick:.2f}".rstrip("0").rstrip(".")))
    box, parts = _rows([bar.name for bar in bars], [((at + reach) / (2 * reach), name) for at, name in ticks], axis)
    even = _within(box, 0.0, -reach, reach)
    parts.append(_line([(even, box.top), (even, box.bottom)], "even"))
    for number, bar in enumerate(bars):
        y = _middle(box, number)
        low, high = (_within(box, math.log(end), -reach, reach) for end in (bar.low, bar.high))
        parts.append(_line([(low, y), (high, y)], "allowed"))
        for at_ratio, is_filled in bar.dots:
            at = _within(box, math.log(at_ratio), -reach, reach)
            parts.append(_dot((at, y), 3.2, "dot" if is_filled else "dot hollow"))
    return _svg("plot", _WIDTH, box.bottom + _AXIS, label, parts)


def work_over_time(work: WorkOverTime) -> Markup:
    """Steps of work, a line for each size of a fleet, and the busiest window shaded; from 0 to the most of them."""
    width, height = _WORK
    box = Box(34.0, 26.0, width - 16, height - 24)
    most = 1.12 * max(*work.devices, work.window[2], *(fleet.high for fleet in work.fleets), 1e-9)
    length = work.step * len(work.devices)

    def x(at: datetime) -> float:
        return box.left + (box.right - box.left) * max(0.0, min(1.0, (at - work.begins_at) / length))

    def y(devices: float) -> float:
        return _within(Box(box.bottom, 0, box.top, 0), devices, 0.0, most)

    parts = [_label("name", 2, 12, "full devices")]
    row = Markup('<line class="grid" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/>')
    for tick in _ticks(most):
        parts += [
            row.format(box.left, box.right, y(tick), y(tick)),
            _label("to", box.left - 5, y(tick) + 4, f"{tick:g}"),
        ]
    begins, lasts, devices = work.window
    left, right = x(begins), x(begins + lasts)
    shade = Markup('<rect class="window" x="{:.1f}" y="{:g}" width="{:.1f}" height="{:g}"/>')
    parts.append(shade.format(left, box.top, max(1.0, right - left), box.bottom - box.top))
    corners = [(x(work.begins_at), y(0.0))]
    for number, value in enumerate(work.devices):
        corners += [(x(work.begins_at + edge * work.step), y(value)) for edge in (number, number + 1)]
    corners.append((corners[-1][0], y(0.0)))
    parts.append(Markup('<polygon class="work" points="{}"/>').format(_text(corners)))
    parts.append(_line([(left, y(devices)), (max(right, left + 1), y(devices))], "mean"))
    side, at = ("to", right) if left > (box.left + box.right) / 2 else ("from", left)
    parts += [_label(side, at, box.top - 3, work.window_name), *_fleet_lines(work.fleets, box, y)]
    last = work.begins_at + length
    label = "; ".join(
        (
            f"Work that arrived from {minute(work.begins_at)} to {minute(last)}, at most {max(work.devices):.2f} full "
            "devices",
            work.window_name,
            *(f"{fleet.name}: {how_many(fleet.num_devices, 'device')}" for fleet in work.fleets),
        )
    )
    return _svg("plot", width, height, label, [*parts, _time_labels(box, work.begins_at, last)])


def _fleet_lines(fleets: Sequence[FleetLine], box: Box, y: Callable[[float], float]) -> Iterator[Markup]:
    """A line for each size with the names of its fleets, the lowest first; names that would touch stand higher."""
    free = box.bottom - 3
    for number in sorted({fleet.num_devices for fleet in fleets}):
        of_size = [fleet for fleet in fleets if fleet.num_devices == number]
        is_expected = all(fleet.is_expected for fleet in of_size)
        yield _line([(box.left, y(number)), (box.right, y(number))], "fleet expected" if is_expected else "fleet")
        at = min(free, y(number) - 3)
        yield _label("to name over", box.right - 2, at, f"{_short(', '.join(f.name for f in of_size), 40)}: {number}")
        free = at - 12
        for fleet in of_size:
            if fleet.low < fleet.high:
                yield _line([(box.right + 5, y(fleet.low)), (box.right + 5, y(fleet.high))], "whisker")


def _ticks(most: float) -> list[float]:
    """At most five round numbers from 0 to `most`, evenly spaced."""
    size = 10.0 ** math.floor(math.log10(most))
    step = next(size * by for by in (0.2, 0.5, 1.0, 2.0, 5.0) if most / (size * by) < 5)
    return [step * number for number in range(int(most / step) + 1)]


def _course(history: Mapping[str, Any], box: Box, first: datetime, last: datetime) -> Markup:
    """The course of α₁ of one task in a box whose times go from `first` to `last`, with room on both sides."""
    step = timedelta(seconds=history["step_s"])
    pad = (last - first) * 0.04 or timedelta(minutes=1)
    begin, length = first - pad, last - first + 2 * pad

    def x(at: datetime) -> float:
        return _within(box, (at - begin) / length, 0.0, 1.0)

    def y(alpha: float) -> float:
        return box.top + (box.bottom - box.top) * (1 - alpha)

    parts = [_grid(box, y), _time_labels(box, first, last)]
    for mark in history["revisions"]:
        parts.append(_mark(box, x(datetime.fromisoformat(mark["at"])), ", ".join(mark["changed"])))
    traffic = _points(history["traffic"], step / 2)
    for stretch in _stretches([(at, (low, mean, high)) for at, low, mean, high in traffic], step):
        band = [(x(at), y(high)) for at, (_, _, high) in stretch]
        band += [(x(at), y(low)) for at, (low, _, _) in reversed(stretch)]
        middle = [(x(at), y(mean)) for at, (_, mean, _) in stretch]
        if len(stretch) > 1:
            parts += [Markup('<polygon class="band" points="{}"/>').format(_text(band)), _line(middle, "line")]
        else:
            parts.append(_line([band[0], band[1]], "whisker"))
        parts += [_dot(point, 2.2, "point") for point in middle]
    for at, low, mean, high in _points(history["probes"], timedelta()):
        parts += [_line([(x(at), y(low)), (x(at), y(high))], "whisker probe"), _diamond((x(at), y(mean)), 4.0, "probe")]
    return Markup("").join(parts)


def _times(history: Mapping[str, Any]) -> list[datetime]:
    points = [*_points(history["traffic"], timedelta(seconds=history["step_s"]) / 2)]
    points += _points(history["probes"], timedelta())
    return [at for at, *_ in points] + [datetime.fromisoformat(mark["at"]) for mark in history["revisions"]]


def _course_label(history: Mapping[str, Any]) -> str:
    """What the course shows, for those who cannot see it."""
    parts = [
        f"{name} {share(points[0]['alpha_1']['mean'])} to {share(points[-1]['alpha_1']['mean'])}"
        for name in ("traffic", "probes")
        if (points := history[name])
    ]
    parts += [
        f"{', '.join(mark['changed'])} changed {datetime.fromisoformat(mark['at']).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        for mark in history["revisions"]
    ]
    return ", ".join(parts)


def _points(points: Iterable[Mapping[str, Any]], middle: timedelta) -> list[tuple[datetime, float, float, float]]:
    """When, lower bound, mean, upper bound; a point of a stretch stands in its middle."""
    return [
        (datetime.fromisoformat(p["start"]) + middle, *(p["alpha_1"][name] for name in ("low", "mean", "high")))
        for p in points
    ]


def _stretches(points: Sequence[tuple[datetime, Any]], step: timedelta) -> list[list[tuple[datetime, Any]]]:
    """Points in a row without a gap."""
    stretches = [list(points[:1])] if points else []
    for before, point in pairwise(points):
        if point[0] - before[0] > step:
            stretches.append([])
        stretches[-1].append(point)
    return stretches


def _grid(box: Box, y: Callable[[float], float]) -> Markup:
    row = Markup('<line class="grid" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/><text x="{:g}" y="{:.1f}">{}</text>')
    rows = (0.0, 0.25, 0.5, 0.75, 1.0) if box.bottom - box.top > 100 else (0.0, 0.5, 1.0)
    ends = box.left, box.right
    labels = ((y(v), "1" if v == 1 else share(v)) for v in rows)
    return Markup("").join(row.format(*ends, at, at, box.left - 32, at + 4, label) for at, label in labels)


def _time_labels(box: Box, first: datetime, last: datetime) -> Markup:
    form = "%d %b" if last - first > timedelta(days=2) else "%d %b %H:%M"
    y = box.bottom + 17
    ends = [_label("from", box.left, y, f"{first.astimezone(UTC):{form}}")]
    if last > first:
        ends.append(_label("to", box.right, y, f"{last.astimezone(UTC):{form}}"))
    return Markup("").join(ends)


def _mark(box: Box, x: float, changed: str) -> Markup:
    side, shift = ("to", -4) if x > box.left + (box.right - box.left) * 0.8 else ("from", 4)
    line = Markup('<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1:g}" y2="{2:g}"/>').format(x, box.top, box.bottom)
    return line + _label(side, x + shift, box.bottom - 5, changed)


def _rows(names: Sequence[str], ticks: Sequence[tuple[float, str]], axis: str) -> tuple[Box, list[Markup]]:
    """A row for each name, and an axis below; `ticks` are shares of the axis and their labels."""
    box = Box(_NAMES, 6.0, _WIDTH - 16, 6.0 + _ROW * len(names))
    line = Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1:g}" y2="{2:g}"/>')
    parts = [_label("to name", box.left - 10, _middle(box, i) + 4, _short(name, 24)) for i, name in enumerate(names)]
    for at, label in ticks:
        x = _within(box, at, 0.0, 1.0)
        parts += [line.format(x, box.top, box.bottom), _label("mid", x, box.bottom + 14, label)]
    return box, [*parts, _label("mid", (box.left + box.right) / 2, box.bottom + 32, axis)]


def _middle(box: Box, row: int) -> float:
    return box.top + _ROW * (row + 0.5)


def _within(box: Box, value: float, first: float, last: float) -> float:
    """Where a value stands between the sides of a box, which are `first` and `last`."""
    return box.left + (box.right - box.left) * (value - first) / (last - first)


def _svg(name: str, width: float, height: float, label: str, parts: Iterable[Markup]) -> Markup:
    return Markup('<svg class="{}" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}</svg>').format(
        name, width, height, label, Markup("").join(parts)
    )


def _label(name: str, x: float, y: float, text: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(name, x, y, text)


def _short(name: str, num_chars: int) -> str:
    return name if len(name) <= num_chars else name[: num_chars - 1] + "…"


def _line(points: Sequence[Point], name: str) -> Markup:
    return Markup('<polyline class="{}" points="{}"/>').format(name, _text(points))


def _dot(point: Point, radius: float, name: str) -> Markup:
    return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}"/>').format(name, *point, radius)


def _diamond(point: Point, radius: float, name: str) -> Markup:
    x, y = point
    corners = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
    return Markup('<polygon class="{}" points="{}"/>').format(name, _text(corners))


def _text(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


#: Before a unit and within an interval no line may end.
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|×|s|ms|min|h|GB|MB)(?!\w)|[-+\d.]+\])")


def kept_together(value: Any) -> Any:
    """A text from outside without what turns the direction of the text around it; markup as it is.

    A field of a form returns the value that was entered, so its value goes through `e`, which makes markup of it.
    """
    return _UNIT.sub("\N{NO-BREAK SPACE}", harmless(value)) if type(value) is str else value


def breaks(name: str) -> Markup:
    """A name that may be broken after its underscores, hyphens and points."""
    shown = escape(harmless(name))
    for mark in ("_", "-", "."):
        shown = shown.replace(mark, mark + Markup("<wbr>"))
    return shown


#: What every page writes and draws with.
_WORDS: Final[Mapping[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        acceptance_of,
        alpha_over_time,
        at_load,
        breaks,
        computed,
        control,
        how_many,
        counted_apart,
        counts,
        draft_lengths,
        drafted_by_load,
        drafted_sentence,
        figure,
        load,
        named,
        percent,
        rate,
        ratio,
        sentence,
        setting,
        share,
        share_with_interval,
        sparkline,
        why,
        words,
    )
}


@cache
def environment(package: str, folder: str = ".") -> Environment:
    """The templates in a folder of a package; they may include `style.css`, and write with the words of every page."""
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package, folder), PackageLoader("alphaloop.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=kept_together,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(_WORDS)
    return templates
