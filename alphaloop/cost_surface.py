"""Times over (context, batch, width), interpolated linearly between what was measured and held constant outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeAlias

#: Widths, ascending, and the value at each.
Line: TypeAlias = tuple[Sequence[float], Sequence[float]]
#: Lines by batch size.
Plane: TypeAlias = Mapping[int, Line]


class Surface:
    """One drafter's or the target's times.

    `planes` are by context, milliseconds. The context with the most points is the base. A value at another context is
    the base's value times a ratio, because only a few shapes are measured there.
    """

    def __init__(self, planes: Mapping[int, Plane]) -> None:
        base = max(planes, key=lambda context: (sum(len(line[0]) for line in planes[context].values()), -context))
        self._base = planes[base]
        self._ratios: list[tuple[int, Plane | None]] = [
            (context, None if context == base else self._over_base(planes[context])) for context in sorted(planes)
        ]

    def line(self, batch: float, context: float | None) -> Line:
        """Milliseconds by width; without a `context`, at the one with the most points."""
        ms = _line(self._base, batch)
        if context is None or len(self._ratios) == 1:
            return ms
        after = bisect_left(self._ratios, context, key=lambda ratio: ratio[0])
        (far, one), (near, other) = self._ratios[min(after, len(self._ratios) - 1)], self._ratios[max(after - 1, 0)]
        share = (context - near) / (far - near) if far > near else 0.0
        ratio = _blend(_flat(other, batch), _flat(one, batch), share)
        widths = sorted({*ms[0], *ratio[0]})
        return widths, [interpolated(ms, width) * interpolated(ratio, width) for width in widths]

    def _over_base(self, plane: Plane) -> Plane:
        return {
            batch: (
                widths,
                [ms / interpolated(_line(self._base, batch), width) for width, ms in zip(widths, values, strict=True)],
            )
            for batch, (widths, values) in plane.items()
        }


def _line(plane: Plane, batch: float) -> Line:
    """Values by width at one batch size, interpolated between the two nearest that were measured."""
    if batch in plane:
        return plane[int(batch)]
    sizes = sorted(plane)
    after = bisect_left(sizes, batch)
    if after in (0, len(sizes)):
        return plane[sizes[min(after, len(sizes) - 1)]]
    smaller, larger = sizes[after - 1], sizes[after]
    return _blend(plane[smaller], plane[larger], (batch - smaller) / (larger - smaller))


def _flat(plane: Plane | None, batch: float) -> Line:
    return ((1,), (1.0,)) if plane is None else _line(plane, batch)


def _blend(one: Line, other: Line, share: float) -> Line:
    """(1 - share) · one + share · other, at every width of either."""
    if share == 0.0 or one is other:
        return one
    widths = sorted({*one[0], *other[0]})
    return widths, [(1 - share) * interpolated(one, w) + share * interpolated(other, w) for w in widths]


def interpolated(line: Line, x: float) -> float:
    """The value of the line at width `x`."""
    xs, ys = line
    after = bisect_left(xs, x)
    if after == 0:
        return ys[0]
    if after == len(xs):
        return ys[-1]
    x0, y0 = xs[after - 1], ys[after - 1]
    return y0 + (ys[after] - y0) * (x - x0) / (xs[after] - x0)
