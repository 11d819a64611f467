"""How long a round takes by how many tokens it may draft, where a server follows requests in that. Pure.

    ms(k) = V + w(k) · (L - V)        w(k) = max(0, 1 - θ · (1 - k / K))        L where L < V

L is a round at the route's longest draft K, and V one of the vanilla route, to which such a server belongs. Both are
laws over requests in flight and context (time_law.py). A round of k drafts is a pass of k + 1 positions, so at θ = 1
time grows evenly with the width, from V to L. θ = 0 is a server on which every length takes as long as the longest,
because the pass reads weights or drafting itself takes the time; θ > 1 one on which short drafts cost hardly more than
none. With nothing known θ is anywhere between 0 and 2. Time never falls with k.

Given θ, L is a linear regression. θ is summed over: each of a row of values has a law of its own, weighed by how likely
it makes the times (its marginal likelihood). What is told is their mean, and the variance of all together: requests of
one length alone leave it open whether L is long or θ is. V is taken as it is known. Its doubt counts in what is told of
short drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from alphaloop.cost import BASE_CONTEXT
from alphaloop.cost_doubt import LogEstimate
from worker.costs.time_law import (
    LEAST_SHARE,
    MOST_SD,
    NUM_SWEEPS,
    Array,
    Prior,
    Time,
    TimeLaw,
    Weighing,
    precision_of,
    rows_of,
)

#: Values of θ, all as likely with nothing known.
_SLOPES: Final = np.linspace(0.0, 2.0, 17)
_PRIOR: Final = np.full(len(_SLOPES), 1 / len(_SLOPES))


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """The law of a route at every draft length."""

    nodes: tuple[float, ...]  #: where L may bend
    vanilla: TimeLaw
    weights: Array  #: of each θ
    coefficients: Array  #: of L, one row for each θ
    covariances: npt.NDArray[np.floating]  #: of the coefficients, one matrix for each θ
    least_ms: float  #: a shorter L is not believed
    longest: TimeLaw | None = None  #: L, where no time was of a shorter draft

    def at(self, size: float, context: float = BASE_CONTEXT, *, length: float = 1.0) -> LogEstimate:
        """ln(milliseconds) and its variance, at that share of the longest draft."""
        if length >= 1.0 and self.longest is not None:
            return self.longest.at(size, context)
        (row,) = rows_of(self.nodes, [size], [context])
        vanilla = self.vanilla.at(size, context)
        vanilla_ms = math.exp(vanilla.mean)
        longest_ms = np.maximum(self.coefficients @ row, self.least_ms)
        shares = np.where(longest_ms > vanilla_ms, _shares(length), 1.0)
        each_ms = vanilla_ms + shares * (longest_ms - vanilla_ms)
        ms = float(self.weights @ each_ms)
        variances = shares**2 * (self.covariances @ row @ row)
        variances += ((1.0 - shares) * vanilla_ms) ** 2 * vanilla.variance
        variance = float(self.weights @ (variances + (each_ms - ms) ** 2))
        return LogEstimate(math.log(ms), min(variance / ms**2, MOST_SD**2))


def assumed_lengths(longest: TimeLaw, vanilla: TimeLaw) -> LengthLaw:
    """Before any request with a shorter draft: about even growth from the vanilla round to the longest draft's."""
    count = len(_SLOPES)
    coefficients = np.tile(np.asarray(longest.coefficients), (count, 1))
    covariances = np.tile(longest.covariance, (count, 1, 1))
    return LengthLaw(longest.nodes, vanilla, _PRIOR, coefficients, covariances, longest.least_ms, longest)


def fitted_lengths(
    nodes: Sequence[float], times: Sequence[Time], prior: Prior, vanilla: TimeLaw, half_life: float
) -> LengthLaw:
    """The law after `times` of any length, the latest last, at least one. `prior` is that of the longest draft."""
    nodes = tuple(nodes)
    rows = rows_of(nodes, [time.size for time in times], [time.context for time in times])
    ms = np.array([time.ms for time in times])
    least_ms = LEAST_SHARE * float(ms.min())
    shares = np.array([_shares(time.length) for time in times]).T  # by θ, then by time
    vanilla_ms = np.maximum(rows @ np.asarray(vanilla.coefficients), vanilla.least_ms)
    mean = np.array([*prior.values, prior.context, prior.context_each])
    precision = precision_of(nodes, prior)
    weighing = Weighing(times, half_life)
    expected, weights = np.maximum(ms, least_ms), _PRIOR
    coefficients, covariances = np.empty((len(_SLOPES), len(mean))), np.empty((len(_SLOPES), len(mean), len(mean)))
    for _ in range(NUM_SWEEPS):
        precisions = weighing.precisions(expected)
        likelihoods = np.empty(len(_SLOPES))
        for i, share in enumerate(shares):
            moves, wanted = rows * share[:, None], ms - (1.0 - share) * vanilla_ms
            known = precision + (moves * precisions[:, None]).T @ moves
            covariances[i] = np.linalg.inv(known)
            coefficients[i] = covariances[i] @ (precision @ mean + moves.T @ (precisions * wanted))
            missed, moved = wanted - moves @ coefficients[i], coefficients[i] - mean
            likelihoods[i] = -0.5 * (
                precisions @ missed**2 + moved @ precision @ moved + float(np.linalg.slogdet(known)[1])
            )
        weights = np.exp(likelihoods - likelihoods.max())
        weights = weights / weights.sum()
        each_ms = vanilla_ms + shares * (coefficients @ rows.T - vanilla_ms)
        expected = np.maximum(weights @ each_ms, least_ms)
        weighing.learn((ms - expected) / expected)
    return LengthLaw(nodes, vanilla, weights, coefficients, covariances, least_ms)


def _shares(length: float) -> Array:
    """w, for each θ."""
    return np.maximum(0.0, 1.0 - _SLOPES * (1.0 - length))
