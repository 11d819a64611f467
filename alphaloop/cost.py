"""What a round costs and what it brings.

A round of k drafted tokens takes draft time plus one target pass of width k + 1. Both are measured on the device, at a
few (batch, width, context) points, and interpolated in between: a pass of width 8 may cost hardly more than one of
width 1 (a GPU, or a CPU reading its weights from memory), or eight times as much, and only the device knows. What real
rounds took corrects the points while the worker runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final, TypeAlias

#: Tokens that a measured sequence already has, where nothing else is said.
BASE_CONTEXT: Final = 256


class CostKind(StrEnum):
    """What a point timed."""

    ROUND = "round"  #: one round's target pass, or one round's proposal
    PREFILL = "prefill"  #: reading a prompt that was never seen


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Median time at one shape: `width` target positions for each of `batch` sequences with `context` tokens before.

    `drafter` is None for the target's own time; otherwise the point is the time that drafter needs to propose
    `width - 1` tokens for each of `batch` sequences. Of a prefill `width` is the prompt's length, and `context` is 0.
    """

    drafter: str | None
    batch: int
    width: int
    median_ms: float  #: as it was measured
    num_samples: int
    context: int = BASE_CONTEXT
    kind: CostKind = CostKind.ROUND
    correction: float = 1.0  #: what real rounds took, over `median_ms`
    num_corrections: int = 0  #: real rounds behind the correction
    correction_variance: float = 0.0  #: variance of ln(correction)

    @property
    def ms(self) -> float:
        """Milliseconds that a real round is expected to take."""
        return self.median_ms * self.correction


#: Widths, ascending, and the value at each.
_Line: TypeAlias = tuple[Sequence[float], Sequence[float]]
#: Lines by batch size.
_Plane: TypeAlias = Mapping[int, _Line]


class CostTable:
    """Costs, interpolated linearly in context, batch and width, held constant outside what was measured.

    The context with the most points is measured at all widths and batches, the others at a few of them: a value there
    is the base's value times a ratio that is interpolated between those few.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        self.points: Final = tuple(sorted(points, key=_order))
        self._rounds: dict[str | None, _Surface] = {}
        self._prompts: dict[str | None, tuple[list[float], list[float]]] = {}
        planes: dict[str | None, dict[int, dict[int, tuple[list[float], list[float]]]]] = {}
        for point in self.points:
            if point.kind is CostKind.PREFILL:
                widths, values = self._prompts.setdefault(point.drafter, ([], []))
            else:
                plane = planes.setdefault(point.drafter, {}).setdefault(point.context, {})
                widths, values = plane.setdefault(point.batch, ([], []))
            widths.append(point.width)
            values.append(point.ms)
        for drafter, by_context in planes.items():
            self._rounds[drafter] = _Surface(by_context)

    @property
    def is_empty(self) -> bool:
        """Whether the target was never measured."""
        return None not in self._rounds

    def rounds(self, batch: int, context: float | None = None) -> RoundCosts:
        """The costs of rounds of `batch` sequences; without a `context`, at the one with the most points."""
        return RoundCosts(self._rounds, batch, context)

    def part_ms(self, drafter: str | None, batch: int, width: float, context: float | None = None) -> float | None:
        """Milliseconds of the target's pass, or of that drafter's proposal for it; None when never measured.

        Without a `context`, at the one with the most points. The width may be a mean over the sequences.
        """
        return self.rounds(batch, context).part_ms(drafter, width)

    def round_ms(
        self, drafter: str | None, batch: int, num_draft_tokens: int, context: float | None = None
    ) -> float | None:
        """Milliseconds of a round in which every sequence has so many draft tokens; None when never measured."""
        return self.rounds(batch, context).round_ms(drafter, num_draft_tokens)

    def prefill_ms(self, drafter: str | None, num_tokens: float) -> float:
        """Expected milliseconds to read one prompt: interpolated, by the token beyond the longest one measured.

        0 when never measured: a prompt is read in every mode, so not knowing its cost only draws ratios apart.
        """
        prompts = self._prompts.get(drafter)
        if not prompts or num_tokens <= 0:
            return 0.0
        longest, ms = prompts[0][-1], prompts[1][-1]
        return ms * num_tokens / longest if num_tokens > longest else _interpolate(prompts, num_tokens)


class RoundCosts:
    """The same, for one batch size and one context: what `decide` asks for once and then looks up many times."""

    def __init__(self, surfaces: Mapping[str | None, _Surface], batch: int, context: float | None) -> None:
        self._surfaces = surfaces
        self._lines: dict[str | None, _Line] = {}
        self._steps: list[float] = []  # of the target's time, from one width to the next
        self.batch, self._context = batch, context

    def part_ms(self, drafter: str | None, width: float) -> float | None:
        """Milliseconds of the target's pass, or of that drafter's proposal for it; None when never measured."""
        line = self._lines.get(drafter)
        if line is None:
            if drafter not in self._surfaces:
                return None
            line = self._lines[drafter] = self._surfaces[drafter].line(self.batch, self._context)
        return _interpolate(line, width)

    def round_ms(
        self,
        drafter: str | None,
        num_draft_tokens: int,
        proposed: Sequence[float] | None = None,
        longest_proposed: float | None = None,
    ) -> float | None:
        """Expected milliseconds of one round at k = `num_draft_tokens`; None when never measured.

        `proposed[i]` is how many tokens a sequence gets on average when it asks for i, from 0; always i unless given.
        The drafter's own time is for the longest proposal of the batch, `longest_proposed` tokens on average, k unless
        given; one that was never measured makes the cost unknown rather than free.
        """
        if drafter is None or num_draft_tokens == 0:
            return self.part_ms(None, num_draft_tokens + 1)
        draft = self.part_ms(drafter, 1 + (num_draft_tokens if longest_proposed is None else longest_proposed))
        target = self._pass_ms(range(num_draft_tokens + 1) if proposed is None else proposed, num_draft_tokens)
        return None if draft is None or target is None else draft + target

    def _pass_ms(self, proposed: Sequence[float], k: int) -> float | None:
        """The target's part, for what is proposed, without padding.

        One sequence: E[T(1 + W)] = T(1) + Σ_{i≤k} P(W ≥ i) · (T(i + 1) - T(i)). A device's time goes in steps, so the
        time of the mean width is another. Several: their mean width decides, and varies less. Nobody proposes with
        probability (1 - P(W ≥ 1))^batch, and the pass is 1 wide; otherwise it is 1 + E[W] / P(somebody) on average.
        """
        narrow = self.part_ms(None, 1)
        if narrow is None:
            return None
        if self.batch == 1:
            while len(self._steps) < k:
                width = len(self._steps) + 1
                self._steps.append((self.part_ms(None, width + 1) or 0.0) - (self.part_ms(None, width) or 0.0))
            each = zip(pairwise(proposed), self._steps[:k], strict=False)
            return narrow + sum((after - before) * step for (before, after), step in each)
        somebody = 1 - (1 - proposed[1]) ** self.batch
        wide = self.part_ms(None, 1 + proposed[k] / somebody) if somebody > 0 else 0.0
        return None if wide is None else somebody * wide + (1 - somebody) * narrow


class _Surface:
    """One drafter's or the target's times over (context, batch, width)."""

    def __init__(self, planes: Mapping[int, _Plane]) -> None:
        base = max(planes, key=lambda context: (sum(len(line[0]) for line in planes[context].values()), -context))
        self._base = planes[base]
        self._ratios: list[tuple[int, _Plane | None]] = [
            (context, None if context == base else self._over_base(planes[context])) for context in sorted(planes)
        ]

    def line(self, batch: int, context: float | None) -> _Line:
        ms = _line(self._base, batch)
        if context is None or len(self._ratios) == 1:
            return ms
        after = bisect_left(self._ratios, context, key=lambda ratio: ratio[0])
        (far, one), (near, other) = self._ratios[min(after, len(self._ratios) - 1)], self._ratios[max(after - 1, 0)]
        share = (context - near) / (far - near) if far > near else 0.0
        ratio = _blend(_flat(other, batch), _flat(one, batch), share)
        widths = sorted({*ms[0], *ratio[0]})
        return widths, [_interpolate(ms, width) * _interpolate(ratio, width) for width in widths]

    def _over_base(self, plane: _Plane) -> _Plane:
        return {
            batch: (
                widths,
                [ms / _interpolate(_line(self._base, batch), width) for width, ms in zip(widths, values, strict=True)],
            )
            for batch, (widths, values) in plane.items()
        }


def expected_tokens_per_round(reach: Sequence[float], acceptance: Sequence[float]) -> float:
    """Expected tokens of a round: 1 + Σ_i Π_{j≤i} reach_j · α_j.

    `reach[j]` is the probability that position j was proposed, given that all before it were accepted;
    `acceptance[j]` is α_j. With reach 1 and constant α this is Leviathan et al. 2023, (1 - α^(k+1)) / (1 - α).
    """
    tokens, through = 1.0, 1.0
    for r, a in zip(reach, acceptance, strict=True):
        through *= r * a
        tokens += through
    return tokens


def _order(point: CostPoint) -> tuple[str, str, int, int, int]:
    return (point.drafter or "", point.kind, point.context, point.batch, point.width)


def _line(plane: _Plane, batch: int) -> _Line:
    """Values by width at one batch size, interpolated between the two nearest that were measured."""
    if batch in plane:
        return plane[batch]
    sizes = sorted(plane)
    after = bisect_left(sizes, batch)
    if after in (0, len(sizes)):
        return plane[sizes[min(after, len(sizes) - 1)]]
    smaller, larger = sizes[after - 1], sizes[after]
    return _blend(plane[smaller], plane[larger], (batch - smaller) / (larger - smaller))


def _flat(plane: _Plane | None, batch: int) -> _Line:
    return ((1,), (1.0,)) if plane is None else _line(plane, batch)


def _blend(one: _Line, other: _Line, share: float) -> _Line:
    """(1 - share) · one + share · other, at every width of either."""
    if share == 0.0 or one is other:
        return one
    widths = sorted({*one[0], *other[0]})
    return widths, [(1 - share) * _interpolate(one, w) + share * _interpolate(other, w) for w in widths]


def _interpolate(line: _Line, x: float) -> float:
    xs, ys = line
    after = bisect_left(xs, x)
    if after == 0:
        return ys[0]
    if after == len(xs):
        return ys[-1]
    x0, y0 = xs[after - 1], ys[after - 1]
    return y0 + (ys[after] - y0) * (x - x0) / (xs[after] - x0)
