"""How much longer a treatment round takes than a control round of the same moment, robustly, from blocks.

Every block gives two comparisons, log(t / c): the window before its control slice with the slice, and the window after.
For group s and a window with x proposed tokens a sequence and r times the slice's sequences running,

    log(t / c) = log(q_s + β · (x - x̄_s)) + γ · log r + noise

q_s is the time of a round with the proposals of all rounds of the group, x̄_s on average; β is the time of one more
proposed token; both in vanilla rounds. Look-up proposes in runs, so the windows near control have more or fewer
proposals than all rounds have; β takes that out (a regression estimator: Cochran 1977, ch. 7). γ takes out that the
load changed inside a block. Blocks begin at moments drawn from the device's time, and the speed-up is that of
sequences. So a block counts in proportion to the sequences that run (unequal chances: Hájek 1971).

The fit is Huber's (1964): a comparison further from the rest than 2.5 standard deviations counts as if it were at 2.5,
because a host that becomes slow inside a block spoils it. Both comparisons of a block enter on their own. Without a
difference between the arms each has a symmetric distribution, so that cutting its tails does not shift the mean; the
difference to the mean of both windows has not, because a mean of more rounds is less skewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from alphaloop.switchback.load_law import Floats, load_law
from alphaloop.switchback.slices import Slice
from alphaloop.switchback.strata import ComparedBlock

_CUT: Final = 2.5  #: standard deviations
_MOST_STEPS: Final = 100
#: Differences in proposed tokens a sequence below which β cannot be told.
_NO_SPREAD: Final = 1e-6
_IQR_OF_NORMAL: Final = 1.3489795
#: Of a block's residual that its own pull leaves: a block that alone decides a parameter has no infinite influence.
_LEAST_LEFT: Final = 0.05
#: A fit whose log q goes so far from the median of the group's comparisons has found no minimum there.
_FARTHEST: Final = 3.0


@dataclass(frozen=True, slots=True)
class TimeRatios:
    """Of treatment rounds over control rounds, by group."""

    ratio: Floats  #: [groups], q
    token_cost: float  #: β, in vanilla rounds
    #: [blocks, groups], what each block moved log q by: the sum of squares over blocks is the variance
    influence: Floats
    weight: Floats  #: [blocks]


def time_ratios(blocks: Sequence[ComparedBlock], groups: Sequence[int], mean_proposed: Sequence[float]) -> TimeRatios:
    """Fit q and β. `groups` has the group of each block, `mean_proposed` x̄ of each group; a group needs two blocks."""
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
        found = [law.log_ratio(t, c) for t, c in zip(windows, controls, strict=True)]
        observed = observed - np.array([ratio for ratio, _ in found])
        load, gradient = np.zeros(len(observed)), np.array([slope for _, slope in found])
    weight = np.array([block.before.mean_running for block in blocks])
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
