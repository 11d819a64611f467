"""How the load of servers slows vanilla requests, told from the requests of control slices.

When a control slice begins, the load moves from one endpoint to another. So its requests meet other loads than those of
the treatment windows, in the same direction in every block, and comparing windows with slices cannot tell that from the
effect of speculation. But inside a control slice the load runs through all values up to the usual one. With n requests
at the vanilla endpoint and m elsewhere, whoever sent them,

    log(seconds a round) = α_block + log(1 + g · n + h · m) + log(1 + c · context) + noise

Servers with devices of their own have h = 0, servers that share one have h = g, and neither has to be known before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from alphaloop.switchback.slices import Slice
from alphaloop.switchback.strata import ComparedBlock

Floats: TypeAlias = NDArray[np.float64]

#: Control slices inside which loads must differ, before a law is told from them.
_LEAST_BLOCKS: Final = 4
_MOST_STEPS: Final = 50
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
    """None where the load inside control slices never differs: of a device, whose slices are not parted by load."""
    parted = [index for index, block in enumerate(blocks) if len(block.control_parts) > 1]
    if len(parted) < _LEAST_BLOCKS:
        return None
    parts = [part for index in parted for part in blocks[index].control_parts]
    block = np.repeat(np.arange(len(parted)), [len(blocks[index].control_parts) for index in parted])
    load = np.array([_load(part) for part in parts])
    observed = np.log([part.round_s for part in parts])
    weight = np.sqrt(np.array([part.num_sequence_rounds for part in parts], dtype=np.float64))
    fit = _Fit(observed, load, weight / weight.mean(), block)
    slopes = fit.run()
    influence = np.zeros((len(blocks), _NUM))
    influence[parted] = fit.influence(slopes)
    return LoadLaw(slopes, influence)


class _Fit:
    """Gauss-Newton steps; slopes are not negative."""

    def __init__(self, observed: Floats, load: Floats, weight: Floats, block: NDArray[np.int_]) -> None:
        self._observed, self._load, self._weight = observed, load, weight
        self._num_blocks = int(block.max()) + 1
        self._belongs = (block[:, None] == np.arange(self._num_blocks)).astype(np.float64)  # [parts, blocks]
        self._share = self._belongs * (weight / (self._belongs @ (self._belongs.T @ weight)))[:, None]

    def run(self) -> Floats:
        """The slopes."""
        slopes = np.full(_NUM, _START)
        for _ in range(_MOST_STEPS):
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
        found = np.zeros(_NUM)
        found[free] = np.linalg.solve(square[np.ix_(free, free)], right[free])
        value = float(found @ square @ found / 2 - right @ found)
        if found.min() >= 0 and value < least:
            best, least = found, value
    return best


def _law(load: Floats, slopes: Floats) -> tuple[Floats, Floats]:
    """Log seconds a round, over those of an empty server without context [parts], and the gradient [parts, 3]."""
    requests, context = load[:, :2], load[:, 2:]
    by_requests, by_context = 1 + requests @ slopes[:2], 1 + context @ slopes[2:]
    gradient = np.concatenate([requests / by_requests[:, None], context / by_context[:, None]], axis=1)
    return np.log(by_requests) + np.log(by_context), gradient


def _load(one: Slice) -> tuple[float, float, float]:
    return one.mean_running, one.mean_elsewhere, one.mean_context / 1000
