"""The measured speed-up: what the texts of the treatment would have taken in vanilla rounds, over what they took.

Two parts, each from the rounds that know it best. With one vanilla token a round and a sequence, control slices have no
noise of text; their times are compared with the times right before and after them. How many tokens a treatment round
yields is counted over *all* treatment rounds. For group s of strata (number running, context):

    speed-up = ( Σ_s tokens_s · t̄_s / (q_s · y_s) + P ) / ( Σ_s R_s · t̄_s + P )

y_s is what a control round yields for a sequence: 1 where control is vanilla; where it drafts with a rival, the tokens
of all control slices over their sequence-rounds. R_s are sequence-rounds of the treatment and tokens_s their tokens,
t̄_s its mean time of a round without a prompt, q_s that time over a control round's (`time_ratios`), P the time that
reading prompts added, which is the same in both arms. So every group has the weight that it has in the traffic.

The interval: blocks are the unit of the times, stretches between two blocks the unit of the texts, and t has the
degrees of freedom of Satterthwaite (1946). It holds for one window of time chosen beforehand. Whoever looks every
minute until an interval excludes 1 will see that happen by chance.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from alphaloop.acceptance import Interval, t95
from alphaloop.experiment.observe import SUMS, Phase, Slice, Stratum

#: Blocks below which nothing is estimated, and below which a group of strata does not stand alone.
LEAST_BLOCKS: Final = 8
#: A difference that is not worth acting on.
_NEGLIGIBLE: Final = 0.02


class Verdict(StrEnum):
    """What may be said."""

    FASTER = "faster"  #: speculation is faster than vanilla
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"  #: the interval lies within 2 % of 1
    NO_VERDICT_YET = "no_verdict_yet"


@dataclass(frozen=True, slots=True)
class MeasuredSpeedup:
    """How many times faster a task's texts come with speculation, and the evidence. 95 % bounds."""

    speedup: Interval | None  #: None before there are eight blocks
    num_blocks: int
    num_control_rounds: int
    verdict: Verdict


def measured_speedup(slices: Iterable[Slice]) -> MeasuredSpeedup:
    """The speed-up of the treatment that these slices are of: one task, and one drafter or all it used.

    Give it all slices of a window of time, those between the blocks too. Between 0 and infinity; noise-free data give
    the ratio exactly.
    """
    slices = list(slices)
    blocks = compared_blocks(slices)
    num_control_rounds = sum(block.control.num_rounds for block in blocks)
    if len(blocks) < LEAST_BLOCKS:
        return MeasuredSpeedup(None, len(blocks), num_control_rounds, Verdict.NO_VERDICT_YET)
    treated = [part for part in slices if part.phase is not Phase.CONTROL]
    group_of = collapsed(blocks, (part.stratum for part in treated), least_blocks=LEAST_BLOCKS)
    groups = [group_of[block.stratum] for block in blocks]
    texts = _Texts(treated, group_of)
    times = time_ratios(blocks, groups, texts.mean_proposed.tolist())
    speedup = _interval(texts, times, groups, _ControlTexts(blocks, groups))
    return MeasuredSpeedup(speedup, len(blocks), num_control_rounds, verdict_of(speedup))


class _Texts:
    """What all treatment rounds came to, by stretch of time and group. A stretch ends where the next block begins."""

    def __init__(self, treated: Sequence[Slice], group_of: Mapping[Stratum, int]) -> None:
        num_groups = max(group_of.values()) + 1
        begins: dict[str, float] = defaultdict(lambda: math.inf)
        for part in treated:
            begins[part.block_id] = min(begins[part.block_id], part.started_at.timestamp())
        #: By block, its stretch: what lies before it, and its windows.
        self.order = order = {name: index for index, name in enumerate(sorted(begins, key=lambda name: begins[name]))}
        # [stretches, groups]; rounds with a prompt belong to the tokens, and their proposals are not counted.
        self.tokens, self.rounds, self.plain_rounds, self.proposed = (
            np.zeros((len(order), num_groups)) for _ in range(4)
        )
        plain_s = np.zeros(num_groups)
        whole_s = 0.0
        for part in treated:
            at = order[part.block_id], group_of[part.stratum]
            self.tokens[at] += part.num_tokens + part.num_prompt_tokens
            self.rounds[at] += part.num_sequence_rounds + part.num_prompt_sequence_rounds
            self.plain_rounds[at] += part.num_sequence_rounds
            self.proposed[at] += part.num_proposed
            plain_s[at[1]] += part.sequence_s
            whole_s += part.sequence_s + part.prompt_sequence_s
        plain_rounds = np.maximum(self.plain_rounds.sum(axis=0), 1)
        self.round_s: Floats = plain_s / plain_rounds  # [groups]
        self.mean_proposed: Floats = self.proposed.sum(axis=0) / plain_rounds
        self.prompt_s = max(0.0, whole_s - float(self.rounds.sum(axis=0) @ self.round_s))


class _ControlTexts:
    """Tokens that a control round yields for a sequence, by group, and what each block moved their logarithm by.

    A ratio estimator with blocks as units (Cochran 1977, §6.4). Vanilla rounds yield one, without any error.
    """

    def __init__(self, blocks: Sequence[ComparedBlock], groups: Sequence[int]) -> None:
        num_groups = max(groups) + 1
        belongs = (np.asarray(groups)[:, None] == np.arange(num_groups)).astype(np.float64)  # [blocks, groups]
        tokens, rounds = (
            np.array([float(getattr(block.control, name)) for block in blocks])
            for name in ("num_tokens", "num_sequence_rounds")
        )
        whole_tokens, whole_rounds = belongs.T @ tokens, np.maximum(belongs.T @ rounds, 1.0)
        self.yields: Floats = whole_tokens / whole_rounds  # [groups]
        num_blocks = np.maximum(belongs.sum(axis=0), 2.0)
        corrected = np.sqrt(num_blocks / (num_blocks - 1))
        residual = belongs * (tokens[:, None] - self.yields * rounds[:, None])
        self.influence: Floats = residual / np.maximum(whole_tokens, 1.0) * corrected  # [blocks, groups]
        self.names: Final = [block.control.block_id for block in blocks]


def _interval(texts: _Texts, times: TimeRatios, groups: Sequence[int], control: _ControlTexts) -> Interval:
    """Linearised: see `time_ratios` for the blocks, Cochran 1977, §6.4, for a ratio over stretches."""
    vanilla_s = texts.tokens * texts.round_s / (times.ratio * control.yields)  # [stretches, groups]
    by_times, by_texts = -(times.influence @ vanilla_s.sum(axis=0)), -(control.influence @ vanilla_s.sum(axis=0))
    moved = by_times + by_texts  # [blocks]
    of_times = float(moved @ moved)
    # More proposals than usual make longer rounds too: what they yield is set against what they take.
    extra = texts.proposed - texts.plain_rounds * texts.mean_proposed
    treatment_s = (texts.rounds + times.token_cost / times.ratio * extra) * texts.round_s
    speedup = float(vanilla_s.sum() / treatment_s.sum())
    residual = (vanilla_s - speedup * treatment_s).sum(axis=1)
    degrees_of_texts = float(max(len(residual) - 1, 1))
    of_texts = _serial_variance(residual) * len(residual) / degrees_of_texts
    # Control and the windows around it, which are parts of one stretch, draft for the same texts, easy or hard ones.
    shared = 2 * float(by_texts @ residual[[texts.order[name] for name in control.names]])
    apart = of_times + of_texts
    variance = max(apart + shared, float(by_times @ by_times))
    degrees_of_times = _degrees_of_freedom(moved, times.weight, np.asarray(groups))
    uncertain = of_times**2 / degrees_of_times + of_texts**2 / degrees_of_texts
    whole_s = float(vanilla_s.sum()) + texts.prompt_s
    margin = t95(apart**2 / uncertain if uncertain else math.inf) * math.sqrt(variance) / whole_s
    ratio = whole_s / (float(treatment_s.sum()) + texts.prompt_s)
    return Interval(ratio, ratio * math.exp(-margin), ratio * math.exp(margin))


def _degrees_of_freedom(moved: Floats, weight: Floats, group: NDArray[np.int_]) -> float:
    """Satterthwaite's, of a sum over groups; each has its effective number of blocks (Kish 1965), less one."""
    whole = uncertain = 0.0
    for index in set(group.tolist()):
        own, weights = moved[group == index], weight[group == index]
        variance, num_effective = float(own @ own), float(weights.sum() ** 2 / (weights @ weights))
        whole += variance
        uncertain += variance**2 / max(num_effective - 1, 0.25)
    return whole**2 / uncertain if uncertain else math.inf


def _serial_variance(residual: Floats) -> float:
    """Variance of a sum whose neighbours may correlate, as a text may run through two stretches."""
    return float(residual @ residual) + 2 * max(0.0, float(residual[1:] @ residual[:-1]))


def verdict_of(bounds: Interval) -> Verdict:
    """What may be said of a speed-up with these 95 % bounds."""
    if bounds.low >= 1 - _NEGLIGIBLE and bounds.high <= 1 + _NEGLIGIBLE:
        return Verdict.NO_DIFFERENCE
    if bounds.low > 1:
        return Verdict.FASTER
    return Verdict.SLOWER if bounds.high < 1 else Verdict.NO_VERDICT_YET


#: Doublings of the load within which a control slice of requests is compared.
_NEAR: Final = 0.5


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """A control slice and the treatment windows around it."""

    before: Slice
    control: Slice
    after: Slice
    control_parts: tuple[Slice, ...] = ()  #: of requests: those of `control` at each load

    @property
    def own_sequences(self) -> float:
        """The task's sequences a round, in the window before the control slice."""
        return self.before.num_sequence_rounds / max(self.before.num_rounds, 1)

    @property
    def stratum(self) -> Stratum:
        """By the window before the control slice: what a block is compared with must not depend on what comes of it.

        By the control slice, blocks in a moment of high load would have windows of lower load beside them, and the
        reverse (tried on bursts, vanilla against vanilla: 0.8 % too fast).
        """
        return self.before.stratum


def compared_blocks(slices: Iterable[Slice]) -> list[ComparedBlock]:
    """The blocks that can be compared, in the order they began.

    A block that ended early is left out unless its last window has half the rounds of its first: with one window only,
    a load that grows or falls would count as a difference between the arms.
    """
    by_block: dict[str, dict[Phase, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for part in slices:
        if part.phase is not Phase.BETWEEN and part.num_sequence_rounds:
            by_block[part.block_id][part.phase].append(part)
    blocks = [
        _compared(phases[Phase.BEFORE], phases[Phase.CONTROL], phases[Phase.AFTER])
        for phases in by_block.values()
        if phases.keys() >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}
    ]
    whole = [block for block in blocks if 2 * block.after.num_rounds >= block.before.num_rounds]
    return sorted(whole, key=lambda block: block.control.started_at)


def _compared(before: Sequence[Slice], control: Sequence[Slice], after: Sequence[Slice]) -> ComparedBlock:
    """The control slices of requests whose load is about that of the window before are compared."""
    window = _added_up(before)
    away = [abs(math.log2(part.mean_running / window.mean_running)) for part in control]
    near = [part for part, distance in zip(control, away, strict=True) if distance <= max(_NEAR, min(away))]
    return ComparedBlock(window, _added_up(near), _added_up(after), tuple(control))


def _added_up(slices: Sequence[Slice]) -> Slice:
    """Slices of one block and phase, at least one, as one."""
    first = min(slices, key=lambda part: part.started_at)
    if len(slices) == 1:
        return first
    return replace(first, **{name: sum(getattr(part, name) for part in slices) for name in SUMS})


def collapsed(
    blocks: Sequence[ComparedBlock], strata: Iterable[Stratum], *, least_blocks: int
) -> Mapping[Stratum, int]:
    """The group of every stratum: neighbours are put together until each group has `least_blocks`.

    Collapsed strata (Cochran 1977, §5A.12). Contexts are put together before loads are. What is left over joins the
    last group.
    """
    num_blocks = Counter(block.stratum for block in blocks)
    groups: list[list[Stratum]] = [[]]
    num_grouped = 0
    for stratum in sorted({*strata, *num_blocks}):
        if num_grouped >= least_blocks:
            groups.append([])
            num_grouped = 0
        groups[-1].append(stratum)
        num_grouped += num_blocks[stratum]
    if num_grouped < least_blocks and len(groups) > 1:
        last = groups.pop()
        groups[-1] += last
    return {stratum: index for index, group in enumerate(groups) for stratum in group}


_CUT: Final = 2.5  #: standard deviations
_MOST_STEPS: Final = 100
#: Differences in proposed tokens a sequence below which β is not estimated.
_NO_SPREAD: Final = 1e-6
_IQR_OF_NORMAL: Final = 1.3489795
#: Least share of a block's residual that its own pull leaves: a block that alone decides a parameter has no infinite
#: influence.
_LEAST_LEFT: Final = 0.05
#: A fit whose log q goes so far from the median of the group's comparisons has found no minimum there.
_FARTHEST: Final = 3.0


@dataclass(frozen=True, slots=True)
class TimeRatios:
    """The time of treatment rounds over that of control rounds, by group."""

    ratio: Floats  #: [groups], q
    token_cost: float  #: β, in vanilla rounds
    #: [blocks, groups], what each block moved log q by: the sum of squares over blocks is the variance
    influence: Floats
    weight: Floats  #: [blocks]


def time_ratios(blocks: Sequence[ComparedBlock], groups: Sequence[int], mean_proposed: Sequence[float]) -> TimeRatios:
    """How much longer a treatment round takes than a control round of the same moment, robustly, from blocks.

    Every block gives two comparisons, log(t / c): the window before its control slice with the slice, and the window
    after. For group s and a window with x proposed tokens a sequence and r times the slice's sequences running,

        log(t / c) = log(q_s + β · (x - x̄_s)) + γ · log r + noise

    q_s is the time of a round with the proposals of all rounds of the group, x̄_s on average; β is the time of one more
    proposed token; both in vanilla rounds. Look-up proposes in runs, so the windows near control have more or fewer
    proposals than all rounds have; β takes that out (a regression estimator: Cochran 1977, ch. 7). γ takes out that the
    load changed inside a block. Blocks begin at moments drawn from the device's time, and the speed-up is that of
    the task's sequences. So a block counts in proportion to those that run (unequal chances: Hájek 1971); of requests,
    to all that run.

    The fit is Huber's (1964): a comparison further from the rest than 2.5 standard deviations counts as if it were at
    2.5, because a host that becomes slow inside a block spoils it. Both comparisons of a block enter on their own.
    Without a difference between the arms each has a symmetric distribution, so that cutting its tails does not shift
    the mean; the difference to the mean of both windows has not, because a mean of more rounds is less skewed.

    `groups` has the group of each block, `mean_proposed` x̄ of each group; a group needs two blocks.
    """
    group = np.repeat(np.asarray(groups), 2)  # [comparisons], two a block
    windows = [window for block in blocks for window in (block.before, block.after)]
    controls = [block.control for block in blocks for _ in range(2)]
    observed = np.log([t.round_s / c.round_s for t, c in zip(windows, controls, strict=True)])
    proposed = np.array([_proposed(window) for window in windows]) - np.asarray(mean_proposed)[group]
    law = load_law(blocks)
    if law is None:
        load = np.log([t.mean_running / c.mean_running for t, c in zip(windows, controls, strict=True)])
        gradient = np.zeros((len(observed), 3))
    else:
        expected = [law.log_ratio(t, c) for t, c in zip(windows, controls, strict=True)]
        observed = observed - np.array([ratio for ratio, _ in expected])
        load, gradient = np.zeros(len(observed)), np.array([slope for _, slope in expected])
    weight = np.array([block.before.mean_running if law else block.own_sequences for block in blocks])
    fitted = _Fit(observed, proposed, load, weight / weight.mean(), group, len(mean_proposed)).run()
    if law is None:
        return fitted
    # What moves the law moves every comparison, by its load.
    doubled = np.repeat(weight, 2)[:, None] * (group[:, None] == np.arange(len(mean_proposed)))
    slope_of = (doubled / doubled.sum(axis=0)).T @ gradient  # [groups, 3]
    return replace(fitted, influence=fitted.influence - law.influence @ slope_of.T)


class _Fit:
    """Gauss-Newton steps with Huber's weights, the scale of each group taken anew from its residuals."""

    def __init__(
        self,
        observed: Floats,
        proposed: Floats,
        load: Floats,
        weight: Floats,
        group: NDArray[np.int_],
        num_groups: int,
    ) -> None:
        self._observed, self._proposed, self._load = observed, proposed, load
        self._group, self._num_groups = group, num_groups
        self._block_weight, self._weight = weight, np.repeat(weight, 2)
        self._belongs = (group[:, None] == np.arange(num_groups)).astype(np.float64)  # [comparisons, groups]
        spread = max(float(np.ptp(proposed[group == index])) for index in range(num_groups))
        has_room = len(observed) > 4 * (num_groups + 1)
        self._has_slope = spread > _NO_SPREAD and has_room
        self._has_load = float(np.ptp(load)) > _NO_SPREAD and has_room

    def run(self) -> TimeRatios:
        """Without slopes where the few blocks there are give none: such a fit runs away."""
        medians = np.array([np.median(self._observed[self._group == index]) for index in range(self._num_groups)])
        log_ratio = medians
        slope = elasticity = 0.0
        for step in range(_MOST_STEPS):
            residual, jacobian = self._at(log_ratio, slope, elasticity)
            # The first steps are least squares: a start from medians alone would take proposals for disturbances.
            cut = _CUT * self._scale(residual) if step >= 3 else np.full_like(residual, np.inf)
            huber = cut / np.maximum(np.abs(residual), cut) if step >= 3 else np.ones_like(residual)
            root = np.sqrt(self._weight * huber)
            change = np.linalg.lstsq(jacobian * root[:, None], residual * root, rcond=None)[0].tolist()
            log_ratio = log_ratio + np.array(change[: self._num_groups])
            if np.abs(log_ratio - medians).max() > _FARTHEST:
                self._has_slope = self._has_load = False
                return self.run()
            if self._has_slope:
                slope = max(0.0, slope + change[self._num_groups])
            if self._has_load:
                elasticity += change[-1]
            if step > 3 and max(map(abs, change)) < 1e-10:
                break
        return TimeRatios(np.exp(log_ratio), slope, self._influence(log_ratio, slope, elasticity), self._block_weight)

    def _at(self, log_ratio: Floats, slope: float, elasticity: float) -> tuple[Floats, Floats]:
        ratio = np.exp(log_ratio)[self._group]
        fitted = np.maximum(ratio + slope * self._proposed, 0.05 * ratio)
        columns = [self._belongs * (ratio / fitted)[:, None]]
        if self._has_slope:
            columns.append((self._proposed / fitted)[:, None])
        if self._has_load:
            columns.append(self._load[:, None])
        return self._observed - np.log(fitted) - elasticity * self._load, np.concatenate(columns, axis=1)

    def _scale(self, residual: Floats) -> Floats:
        scale = np.empty(self._num_groups)
        for index in range(self._num_groups):
            low, high = np.percentile(residual[self._group == index], (25, 75))
            scale[index] = (high - low) / _IQR_OF_NORMAL
        return np.maximum(scale, 1e-12)[self._group]

    def _influence(self, log_ratio: Floats, slope: float, elasticity: float) -> Floats:
        """The sandwich's halves (Huber 1981, §7.6), by block, because its two comparisons share a control slice.

        A block pulls the fit towards itself, the more the fewer there are. Its residuals are made as large as they
        would be without that (CR2: Bell and McCaffrey 2002).
        """
        residual, jacobian = self._at(log_ratio, slope, elasticity)
        cut = _CUT * self._scale(residual)
        root = np.sqrt((np.abs(residual) <= cut) * self._weight)
        bread = np.linalg.pinv(jacobian.T @ (jacobian * root[:, None] ** 2))
        rows = (jacobian * root[:, None]).reshape(-1, 2, jacobian.shape[1])  # [blocks, 2, parameters]
        left, vectors = np.linalg.eigh(np.eye(2) - rows @ bread @ rows.transpose(0, 2, 1))
        grown = vectors * np.maximum(left, _LEAST_LEFT)[:, None, :] ** -0.5 @ vectors.transpose(0, 2, 1)
        moved = grown @ (np.clip(residual, -cut, cut) * np.sqrt(self._weight)).reshape(-1, 2, 1)
        outer = (jacobian * np.sqrt(self._weight)[:, None]).reshape(rows.shape)
        influence: Floats = (outer * moved).sum(axis=1) @ bread
        return influence[:, : self._num_groups]


def _proposed(window: Slice) -> float:
    return window.num_proposed / window.num_sequence_rounds


Floats: TypeAlias = NDArray[np.float64]

#: Control slices inside which loads must differ, before a law is fitted to them.
_LEAST_PARTED: Final = 4
_MOST_LOAD_STEPS: Final = 50
#: Where the fit begins: a request more costs a twentieth of an empty server's pass, a thousand tokens as much.
_START: Final = 0.05
#: Standard deviation of the slopes before anything is seen. It holds them where the loads leave a direction open, as
#: under a backlog, when the number of all requests never changes; such a direction does not move the ratio.
_USUAL: Final = 0.5
_NUM: Final = 3


@dataclass(frozen=True, slots=True)
class LoadLaw:
    """The slopes, and what each block moved them by."""

    slopes: Floats  #: [3], of requests beside, of requests elsewhere, of a thousand tokens of context
    influence: Floats  #: [blocks, 3]

    def log_ratio(self, window: Slice, control: Slice) -> tuple[float, Floats]:
        """Log of what the window's load makes a vanilla round take, over the control slice's; its gradient [3]."""
        log_level, gradient = _law(np.array([_load(window), _load(control)]), self.slopes)
        return float(log_level[0] - log_level[1]), gradient[0] - gradient[1]


def load_law(blocks: Sequence[ComparedBlock]) -> LoadLaw | None:
    """How the load of servers slows vanilla requests, fitted to the requests of control slices.

    When a control slice begins, the load moves from one endpoint to another. So its requests meet other loads than
    those of the treatment windows, in the same direction in every block, and comparing windows with slices cannot
    separate that from the effect of speculation. But inside a control slice the load runs through all values up to the
    usual one. With n requests at the vanilla endpoint and m elsewhere, whoever sent them,

        log(seconds a round) = α_block + log(1 + g · n + h · m) + log(1 + c · context) + noise

    Servers with devices of their own have h = 0, servers that share one have h = g, and neither has to be known before.

    None where the load inside control slices never differs: of a device, whose slices are not parted by load.
    """
    parted = [index for index, block in enumerate(blocks) if len(block.control_parts) > 1]
    if len(parted) < _LEAST_PARTED:
        return None
    parts = [part for index in parted for part in blocks[index].control_parts]
    block = np.repeat(np.arange(len(parted)), [len(blocks[index].control_parts) for index in parted])
    load = np.array([_load(part) for part in parts])
    observed = np.log([part.round_s for part in parts])
    weight = np.sqrt(np.array([part.num_sequence_rounds for part in parts], dtype=np.float64))
    fit = _LoadFit(observed, load, weight / weight.mean(), block)
    slopes = fit.run()
    influence = np.zeros((len(blocks), _NUM))
    influence[parted] = fit.influence(slopes)
    return LoadLaw(slopes, influence)


class _LoadFit:
    """Gauss-Newton steps; slopes are not negative."""

    def __init__(self, observed: Floats, load: Floats, weight: Floats, block: NDArray[np.int_]) -> None:
        self._observed, self._load, self._weight = observed, load, weight
        self._num_blocks = int(block.max()) + 1
        self._belongs = (block[:, None] == np.arange(self._num_blocks)).astype(np.float64)  # [parts, blocks]
        self._share = self._belongs * (weight / (self._belongs @ (self._belongs.T @ weight)))[:, None]

    def run(self) -> Floats:
        """The slopes."""
        slopes = np.full(_NUM, _START)
        for _ in range(_MOST_LOAD_STEPS):
            jacobian, residual = self._at(slopes)
            after = _nonnegative(
                jacobian.T @ (jacobian * self._weight[:, None]) + self._penalty(residual) * np.eye(_NUM),
                jacobian.T @ (self._weight * (residual + jacobian @ slopes)),
            )
            is_same = bool(np.abs(after - slopes).max() < 1e-8)
            slopes = after
            if is_same:
                break
        return slopes

    def influence(self, slopes: Floats) -> Floats:
        """What each block moved the slopes by [blocks, 3]."""
        jacobian, residual = self._at(slopes)
        jacobian = jacobian * (slopes > 0)
        bread = np.linalg.inv(jacobian.T @ (jacobian * self._weight[:, None]) + self._penalty(residual) * np.eye(_NUM))
        moved: Floats = self._belongs.T @ (jacobian * (self._weight * residual)[:, None]) @ bread
        return moved * math.sqrt(self._num_blocks / max(self._num_blocks - _NUM, 1))

    def _at(self, slopes: Floats) -> tuple[Floats, Floats]:
        log_level, gradient = _law(self._load, slopes)
        return self._centred(gradient), self._centred(self._observed - log_level)

    def _centred(self, values: Floats) -> Floats:
        centred: Floats = values - self._belongs @ (self._share.T @ values)
        return centred

    def _penalty(self, residual: Floats) -> float:
        """The variance of the noise over that of slopes; never nothing, so that every direction is held."""
        num_free = max(len(residual) - self._num_blocks - _NUM, 1)
        return max(float(self._weight @ residual**2) / num_free, 1e-9) / _USUAL**2


def _nonnegative(square: Floats, right: Floats) -> Floats:
    """The x ≥ 0 with the least xᵀ·square·x / 2 - right·x, among all choices of which slopes are zero."""
    best, least = np.zeros(_NUM), 0.0
    for chosen in product((False, True), repeat=_NUM):
        free = np.flatnonzero(chosen)
        if not len(free):
            continue
        slopes = np.zeros(_NUM)
        slopes[free] = np.linalg.solve(square[np.ix_(free, free)], right[free])
        value = float(slopes @ square @ slopes / 2 - right @ slopes)
        if slopes.min() >= 0 and value < least:
            best, least = slopes, value
    return best


def _law(load: Floats, slopes: Floats) -> tuple[Floats, Floats]:
    """Log seconds a round, over those of an empty server without context [parts], and the gradient [parts, 3]."""
    requests, context = load[:, :2], load[:, 2:]
    by_requests, by_context = 1 + requests @ slopes[:2], 1 + context @ slopes[2:]
    gradient = np.concatenate([requests / by_requests[:, None], context / by_context[:, None]], axis=1)
    return np.log(by_requests) + np.log(by_context), gradient


def _load(part: Slice) -> tuple[float, float, float]:
    return part.mean_running, part.mean_elsewhere, part.mean_context / 1000
