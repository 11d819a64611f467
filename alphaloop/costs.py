"""What a round costs and what it brings.

A round of k drafted tokens takes the time of the draft plus one target pass of width k + 1. Both times are measured on
the device at a few (batch, width, context) points, and interpolated in between. They are measured because devices
differ: a pass of width 8 may cost hardly more than one of width 1 (a GPU, or a CPU that reads its weights from memory),
or eight times as much. What real rounds took corrects the points while the worker runs. Each point carries the variance
of its logarithm, so that decisions know how sure a cost is.

A server that drafts does not report draft and pass separately: there a round has one time, and `batch` is the number of
requests in flight at one server.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median_high
from typing import Final, TypeAlias

#: Tokens that a measured sequence already has, where nothing else is said.
BASE_CONTEXT: Final = 256
#: Batch sizes and contexts of which a table remembers its lines.
_MOST_PREPARED: Final = 1000


class CostKind(StrEnum):
    """What a point timed."""

    ROUND = "round"  #: one round's target pass, or one round's proposal
    PREFILL = "prefill"  #: reading a prompt that was never seen
    SERVED = "served"  #: one round on a server that drafts: servers do not report draft and pass separately


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Median time at one shape: `width` target positions for each of `batch` sequences with `context` tokens before.

    `drafter` is None for the target's own time; otherwise the point is the time that drafter needs to propose
    `width - 1` tokens for each of `batch` sequences, or of a whole round on a server where it drafts. A prefill has the
    prompt's length as its `width`, and `context` 0.
    """

    drafter: str | None
    batch: int
    width: int
    median_ms: float  #: as it was measured
    num_samples: int
    context: int = BASE_CONTEXT
    kind: CostKind = CostKind.ROUND
    correction: float = 1.0  #: what real rounds took, over `median_ms`
    num_corrections: int = 0  #: real rounds that the correction rests on
    correction_variance: float = 0.0  #: of ln(ms): how far a real round's usual time may be from `ms`

    @property
    def ms(self) -> float:
        """Milliseconds that a real round is expected to take."""
        return self.median_ms * self.correction


class CostTable:
    """Costs, interpolated linearly in context, batch and width, held constant outside what was measured.

    The context with the most points is measured at all widths and batches, the others at a few of them: a value there
    is the base's value times a ratio that is interpolated between those few.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        self.points: Final = tuple(sorted(points, key=lambda p: (p.drafter or "", p.kind, p.context, p.batch, p.width)))
        self._prepared: dict[tuple[float, float | None], RoundCosts] = {}
        self._prompts: dict[str | None, tuple[list[float], list[float]]] = {}
        self._served: Final = frozenset(point.drafter for point in self.points if point.kind is CostKind.SERVED)
        planes: dict[str | None, dict[int, dict[int, tuple[list[float], list[float]]]]] = {}
        for point in self.points:
            if point.kind is CostKind.PREFILL:
                widths, values = self._prompts.setdefault(point.drafter, ([], []))
            elif point.drafter in self._served and point.kind is not CostKind.SERVED:
                continue
            else:
                plane = planes.setdefault(point.drafter, {}).setdefault(point.context, {})
                widths, values = plane.setdefault(point.batch, ([], []))
            widths.append(point.width)
            values.append(point.ms)
        self._surfaces = {drafter: Surface(by_context) for drafter, by_context in planes.items()}
        self._variances = _mean_variances(self.points)

    @property
    def is_of_servers(self) -> bool:
        """Whether the rounds are those of servers: each alternative has servers of its own and reads prompts there."""
        return bool(self._served)

    def is_served(self, drafter: str) -> bool:
        """Whether the drafter's points are whole rounds on a server."""
        return drafter in self._served

    def measured(self, drafter: str | None) -> Mapping[int, Sequence[float]]:
        """The widths that were measured, ascending, by batch size; at the context with the most points."""
        surface = self._surfaces.get(drafter)
        return {} if surface is None else {batch: widths for batch, (widths, _) in surface.base.items()}

    def rounds(self, batch: float, context: float | None = None) -> RoundCosts:
        """The costs of rounds of `batch` sequences; without a `context`, at the one with the most points.

        `batch` may be a mean: the sequences at each of several servers.
        """
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        rounds = self._prepared.get((batch, context))
        if rounds is None:
            rounds = RoundCosts(self._surfaces, self._variances, self._served, batch, context)
            self._prepared[batch, context] = rounds
        return rounds

    def part_ms(self, drafter: str | None, batch: float, width: float, context: float | None = None) -> float | None:
        """Milliseconds of the target's pass, or of that drafter's proposal for it; None when never measured."""
        return self.rounds(batch, context).part_ms(drafter, width)

    def prefill_ms(self, drafter: str | None, num_tokens: float) -> float:
        """Expected milliseconds to read one prompt: interpolated, by the token beyond the longest one measured.

        0 when never measured: every mode reads the prompt, so leaving it out only exaggerates ratios.
        """
        prompts = self._prompts.get(drafter)
        if not prompts or num_tokens <= 0:
            return 0.0
        longest, ms = prompts[0][-1], prompts[1][-1]
        return ms * num_tokens / longest if num_tokens > longest else interpolated(prompts, num_tokens)


@dataclass(eq=False)
class RoundCosts:
    """The costs at one batch size and one context, prepared for many reads. Threads may share it."""

    surfaces: Mapping[str | None, Surface]
    variances: Mapping[str | None, Line]
    served: Collection[str | None]
    batch: float
    context: float | None
    _lines: dict[str | None, Line] = field(default_factory=dict, init=False)
    _steps: list[float] = field(default_factory=list, init=False)  #: of the target's time, from one width to the next

    def part_ms(self, drafter: str | None, width: float) -> float | None:
        """Milliseconds of the target's pass, or of that drafter's proposal for it; None when never measured."""
        line = self._lines.get(drafter) or self.line(drafter)
        return None if line is None else interpolated(line, width)

    def line(self, drafter: str | None) -> Line | None:
        """The widths that were measured, and the milliseconds at each; None when never measured."""
        if drafter not in self._lines and drafter in self.surfaces:
            self._lines[drafter] = self.surfaces[drafter].line(self.batch, self.context)
        return self._lines.get(drafter)

    def round_ms(
        self,
        drafter: str | None,
        num_draft_tokens: int,
        proposed: Sequence[float] | None = None,
        longest_proposed: float | None = None,
    ) -> float | None:
        """Expected milliseconds of one round at k = `num_draft_tokens`; None when never measured.

        `proposed` and `longest_proposed` as for `components_ms`.
        """
        if drafter is None or num_draft_tokens == 0:
            return self.part_ms(None, num_draft_tokens + 1)
        components = self.components_ms(drafter, num_draft_tokens, proposed, longest_proposed)
        return None if components is None else sum(components)

    def components_ms(
        self,
        drafter: str,
        num_draft_tokens: int,
        proposed: Sequence[float] | None = None,
        longest_proposed: float | None = None,
    ) -> tuple[float, float] | None:
        """Expected milliseconds of the draft and of the pass of one round at k = `num_draft_tokens` ≥ 1.

        None when either was never measured.

        `proposed[i]` is how many tokens a sequence gets on average when it asks for i, from 0; always i unless given.
        The drafter's time is that of the longest proposal of the batch, `longest_proposed` tokens on average, k unless
        given. A drafter that was never measured makes the cost unknown rather than free. On a server the whole round
        is the draft's: its time is the mean over what is proposed there, and no pass beside it is known.
        """
        if drafter in self.served:
            whole_ms = self.part_ms(drafter, num_draft_tokens + 1)
            return None if whole_ms is None else (whole_ms, 0.0)
        draft_ms = self.part_ms(drafter, 1 + (num_draft_tokens if longest_proposed is None else longest_proposed))
        if draft_ms is None:
            return None
        pass_ms = self._pass_ms(range(num_draft_tokens + 1) if proposed is None else proposed, num_draft_tokens)
        return None if pass_ms is None else (draft_ms, pass_ms)

    def variance(self, drafter: str | None, width: float = 1) -> float:
        """Variance of ln(milliseconds) of the target's pass, or of that drafter's proposal: the mean over its points.

        For a server's rounds it is the mean over those of that width, because rounds of one length say less about
        another. 0 when never measured.
        """
        variances = self.variances.get(drafter)
        return 0.0 if variances is None else interpolated(variances, width)

    def _pass_ms(self, proposed: Sequence[float], k: int) -> float | None:
        """The target's part, for what is proposed, without padding.

        One sequence: E[T(1 + W)] = T(1) + Σ_{i≤k} P(W ≥ i) · (T(i + 1) - T(i)), because T is a step function of width.
        Several: the mean width varies less and is used itself. With probability (1 - P(W ≥ 1))^batch no sequence
        proposes and the pass is 1 wide; otherwise it is 1 + E[W] / P(some sequence proposes) on average.
        """
        narrow = self.part_ms(None, 1)
        if narrow is None:
            return None
        if self.batch == 1:
            if len(self._steps) < k:
                line = self._lines[None]
                self._steps = [interpolated(line, width + 1) - interpolated(line, width) for width in range(1, k + 1)]
            each = zip(pairwise(proposed), self._steps[:k], strict=False)
            return narrow + sum((after - before) * step for (before, after), step in each)
        proposing = 1 - (1 - proposed[1]) ** self.batch
        wide = self.part_ms(None, 1 + proposed[k] / proposing) if proposing > 0 else 0.0
        return None if wide is None else proposing * wide + (1 - proposing) * narrow


def _mean_variances(points: Iterable[CostPoint]) -> dict[str | None, Line]:
    """By what was timed, the target or a drafter; of rounds, not of prompts. By width on servers, else one for all."""
    variances: dict[str | None, dict[int, list[float]]] = {}
    for point in points:
        if point.kind is not CostKind.PREFILL:
            width = point.width if point.kind is CostKind.SERVED else 1
            variances.setdefault(point.drafter, {}).setdefault(width, []).append(point.correction_variance)
    return {
        drafter: (sorted(by_width), [sum(by_width[width]) / len(by_width[width]) for width in sorted(by_width)])
        for drafter, by_width in variances.items()
    }


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
        self.base: Final = planes[base]
        self._ratios: list[tuple[int, Plane | None]] = [
            (context, None if context == base else self._over_base(planes[context])) for context in sorted(planes)
        ]

    def line(self, batch: float, context: float | None) -> Line:
        """Milliseconds by width; without a `context`, at the one with the most points."""
        ms = _line(self.base, batch)
        if context is None or len(self._ratios) == 1:
            return ms
        after = bisect_left(self._ratios, context, key=lambda ratio: ratio[0])
        far, far_ratios = self._ratios[min(after, len(self._ratios) - 1)]
        near, near_ratios = self._ratios[max(after - 1, 0)]
        share = (context - near) / (far - near) if far > near else 0.0
        ratio = _blend(_flat(near_ratios, batch), _flat(far_ratios, batch), share)
        widths = sorted({*ms[0], *ratio[0]})
        return widths, [interpolated(ms, width) * interpolated(ratio, width) for width in widths]

    def _over_base(self, plane: Plane) -> Plane:
        return {
            batch: (
                widths,
                [ms / interpolated(_line(self.base, batch), width) for width, ms in zip(widths, values, strict=True)],
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


def _blend(near: Line, far: Line, share: float) -> Line:
    """(1 - share) · near + share · far, at every width of either."""
    if share == 0.0 or near is far:
        return near
    widths = sorted({*near[0], *far[0]})
    return widths, [(1 - share) * interpolated(near, w) + share * interpolated(far, w) for w in widths]


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


#: Work that slows a host down (a build, a backup, another tenant's load) ends after seconds to minutes.
HALF_LIFE_S: Final = 300.0
#: A return to a drafter that is still slow is noticed within 32 rounds. Once in 8,192 rounds of the target that costs
#: at most 32 / 8,192 = 0.4 % of the time, a fifth of the usual share for exploration.
HALF_LIFE_ROUNDS: Final = 8192
#: Standard deviation of ln(a drafter's slowness over the target's), with nothing known: 95 % within a factor of 2.2.
PRIOR_SD: Final = 0.4
#: Seconds in which a stored estimate does not age: a fiftieth of a half-life.
SHORTEST_PAUSE_S: Final = HALF_LIFE_S / 50
#: Standard deviation of ln(one timing) on a quiet host.
TIMING_SD: Final = 0.1


@dataclass(frozen=True, slots=True)
class LogEstimate:
    """The logarithm of a correction: its expected value and the variance of that value."""

    mean: float
    variance: float

    @property
    def factor(self) -> float:
        """The correction itself."""
        return math.exp(self.mean)


def num_half_lives(seconds: float, num_rounds: float = 0.0) -> float:
    """Half-lives that pass in these seconds and rounds of the target; both age an estimate."""
    return max(0.0, seconds) / HALF_LIFE_S + num_rounds / HALF_LIFE_ROUNDS


def faded(estimate: LogEstimate, towards: float, half_lives: float) -> LogEstimate:
    """The estimate after `half_lives` without a measurement; `towards` is ln(the target's correction).

    The logarithm of a drafter's correction is modelled as an Ornstein–Uhlenbeck process around that of the target's
    correction (Uhlenbeck and Ornstein 1930), because other load on a host slows a drafter down only for a while. With m
    the last estimate of variance v, t the target's level and κ = 2^-h after h half-lives, the estimate becomes

        mean      t + κ · (m - t)
        variance  κ² · v + (1 - κ²) · PRIOR_SD²

    Fading in two steps is fading in one: faded(h1) and then faded(h2) is faded(h1 + h2).
    """
    kept = 2.0**-half_lives
    mean = towards + kept * (estimate.mean - towards)
    return LogEstimate(mean, kept**2 * estimate.variance + (1 - kept**2) * PRIOR_SD**2)


def timing_variance(num_samples: int) -> float:
    """Variance of ln(median of `num_samples` timings): π/2 · σ² / n, the asymptotic one of a normal sample's median."""
    return math.pi / 2 * TIMING_SD**2 / num_samples


def after_pause(points: Iterable[CostPoint], seconds: Mapping[str, float]) -> tuple[CostPoint, ...]:
    """Stored points as they stand after a pause in which nothing was measured; `seconds` are by drafter.

    A drafter's level fades towards the target's; the differences between its shapes stay. The target's points stay too,
    because all alternatives share its level and its first rounds measure it again.
    """
    points = tuple(points)
    towards = level_of(point for point in points if point.drafter is None)
    moved: dict[str, tuple[float, float]] = {}
    for drafter, pause_s in seconds.items():
        if pause_s < SHORTEST_PAUSE_S:
            continue
        own = level_of(point for point in points if point.drafter == drafter)
        half_lives = num_half_lives(pause_s)
        moved[drafter] = faded(LogEstimate(own, 0.0), towards, half_lives).mean - own, half_lives
    return tuple(point if point.drafter not in moved else _moved(point, *moved[point.drafter]) for point in points)


def level_of(points: Iterable[CostPoint]) -> float:
    """ln(correction) over all shapes, as one median; 0 without any."""
    logs = [math.log(point.correction) for point in points]
    return median_high(logs) if logs else 0.0


def _moved(point: CostPoint, by: float, half_lives: float) -> CostPoint:
    variance = faded(LogEstimate(0.0, point.correction_variance), 0.0, half_lives).variance
    return replace(point, correction=point.correction * math.exp(by), correction_variance=variance)


def with_shared_weights(points: Iterable[CostPoint], timed: Mapping[str, str]) -> tuple[CostPoint, ...]:
    """What was measured, and the same under the name of every drafter in `timed`, which has the other one's times."""
    measured = [point for point in points if point.drafter not in timed]
    theirs = (
        replace(point, drafter=name) for name, other in timed.items() for point in measured if point.drafter == other
    )
    return (*measured, *theirs)
