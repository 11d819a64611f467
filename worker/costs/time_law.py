"""How long something takes by its size, learned from times that vary: a robust Bayesian regression. Pure.

    ms = f(size) + (c + e · (size - s_0)) · (context - 256) / 1024

f is a line that may bend at every *node*. Sizes are requests in flight at a server, or tokens of a prompt. A priori

- with nothing known, f has a usual shape: the prior holds its first value, its first slope and its bends, so beyond the
  sizes that were seen f goes straight on;
- where another law is known, f is about a multiple of it: the prior holds the multiple at the first node, and how much
  it changes from node to node.

In both cases the variance grows with the distance from the sizes that were seen.

Times have relative errors. The weight of one halves with every `half_life` newer ones. The further a time is from the
law, the less it counts (Cauchy weights, Holland and Welsch 1977): a server that stalls once moves little. The standard
deviation is taken from the residuals: 1.48 times their median.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from alphaloop.cost import BASE_CONTEXT
from alphaloop.cost_doubt import LogEstimate

Array: TypeAlias = npt.NDArray[np.float64]

#: Tokens of context in which the two coefficients of context are counted.
_CONTEXT_UNIT: Final = 1024
#: Standard deviations at which a time counts half: 95 % as good as least squares where errors are normal.
_CAUCHY: Final = 2.385
NUM_SWEEPS: Final = 6
#: Relative standard deviation of one time before any residual was seen, and the times that this is worth.
_USUAL_SD, _USUAL_TIMES = 0.15, 8
_LEAST_SD: Final = 0.02
#: A time that the line puts at less than so much of the shortest seen, far from what was seen, is not believed.
LEAST_SHARE: Final = 0.5
#: Doubt of a value is never more: within a factor of 3.2 with 95 %.
MOST_SD: Final = 0.6
#: Standard deviation of a bend, as a share of the time at its node.
_BEND_SD: Final = 0.2
#: Of the coefficients of context, as shares of the time at the first node.
_CONTEXT_SD, _CONTEXT_EACH_SD = 0.3, 0.03
_CONTEXT_MEAN: Final = 0.03


class Time(NamedTuple):
    """One time that was taken."""

    size: float
    context: float
    ms: float
    #: Variance of ln(ms); where `is_relative`, in units of the regression's own error.
    variance: float
    is_relative: bool = True
    #: Most draft tokens a round, as a share of the route's longest draft; 1 where all its requests have one length.
    length: float = 1.0


@dataclass(frozen=True, slots=True)
class Prior:
    """The law before any time: values at the nodes, and how far it may be from them."""

    values: tuple[float, ...]
    level_sd: float  #: of the first value, as a share of it
    step_sd: float  #: of the change to the second node, as a share of the first value; of a multiple, to every node
    is_multiple: bool = False  #: whether the law is about a multiple of `values`, rather than as straight
    context: float = 0.0
    context_each: float = 0.0


@dataclass(frozen=True, slots=True)
class TimeLaw:
    """A fitted law."""

    nodes: tuple[float, ...]
    coefficients: tuple[float, ...]
    covariance: npt.NDArray[np.floating]
    least_ms: float  #: shorter times are not believed
    error_sd: float  #: relative, of one time

    def at(self, size: float, context: float = BASE_CONTEXT) -> LogEstimate:
        """ln(milliseconds) and its variance."""
        (row,) = rows_of(self.nodes, [size], [context])
        ms = float(row @ np.asarray(self.coefficients))
        variance = float(row @ self.covariance @ row)
        ms = max(ms, self.least_ms)
        return LogEstimate(math.log(ms), min(variance / ms**2, MOST_SD**2))

    def as_prior(self, ratio: float, level_sd: float, step_sd: float) -> Prior:
        """The prior of something that takes about `ratio` times as long."""
        values = tuple(ratio * max(value, self.least_ms) for value in self.coefficients[: len(self.nodes)])
        context, context_each = (ratio * value for value in self.coefficients[len(self.nodes) :])
        return Prior(values, level_sd, step_sd, True, context, context_each)


def usual(nodes: Sequence[float], shape: Sequence[float], times: Sequence[Time], slope_sd: float) -> Prior:
    """The prior without a reference: the shape, at the level of the times, at least one; hardly sure of either."""
    levels = sorted(time.ms / float(np.interp(time.size, nodes, shape)) for time in times)
    level = levels[len(levels) // 2]
    values = tuple(level * value for value in shape)
    return Prior(values, 1.0, slope_sd, context=_CONTEXT_MEAN * values[0])


def fitted(nodes: Sequence[float], times: Sequence[Time], prior: Prior, half_life: float) -> TimeLaw:
    """The law after `times`, the latest last. Without any it is the prior."""
    nodes = tuple(nodes)
    mean = np.array([*prior.values, prior.context, prior.context_each])
    precision = precision_of(nodes, prior)
    least_ms = LEAST_SHARE * min([time.ms for time in times] or [min(prior.values)])
    if not times:
        return TimeLaw(nodes, tuple(mean.tolist()), np.linalg.inv(precision), least_ms, _USUAL_SD)
    rows = rows_of(nodes, [time.size for time in times], [time.context for time in times])
    ms = np.array([time.ms for time in times])
    weighing = Weighing(times, half_life)
    coefficients, expected = mean, np.maximum(ms, least_ms)
    covariance = np.linalg.inv(precision)
    for _ in range(NUM_SWEEPS):
        weights = weighing.precisions(expected)
        covariance = np.linalg.inv(precision + (rows * weights[:, None]).T @ rows)
        coefficients = covariance @ (precision @ mean + rows.T @ (weights * ms))
        expected = np.maximum(rows @ coefficients, least_ms)
        weighing.learn((ms - expected) / expected)
    return TimeLaw(nodes, tuple(coefficients.tolist()), covariance, least_ms, weighing.error_sd)


class Weighing:
    """How much each time counts: by its own variance, its age, and how far it was from what was expected last."""

    def __init__(self, times: Sequence[Time], half_life: float) -> None:
        self._sd: Array = np.sqrt(np.array([time.variance for time in times]))
        self._is_relative = np.array([time.is_relative for time in times])
        self._kept = 2.0 ** (-np.arange(len(times))[::-1] / half_life)
        self._trust = np.ones(len(times))
        self.error_sd = _USUAL_SD  #: relative, of one time

    def precisions(self, expected_ms: Array) -> Array:
        """The weight of each time in least squares."""
        weights: Array = self._kept * self._trust / (self._errors() * expected_ms) ** 2
        return weights

    def learn(self, residuals: Array) -> None:
        """Take the relative distances from what was expected."""
        self.error_sd = _error_sd(residuals[self._is_relative], self._kept[self._is_relative])
        self._trust = 1 / (1 + (residuals / self._errors() / _CAUCHY) ** 2)

    def _errors(self) -> Array:
        errors: Array = np.where(self._is_relative, self.error_sd * self._sd, self._sd)
        return errors


def rows_of(nodes: Sequence[float], sizes: Sequence[float], contexts: Sequence[float]) -> Array:
    """How much each coefficient counts in each time. Sizes outside the nodes count as the nearest node."""
    x = np.clip(np.array(sizes, dtype=float), nodes[0], nodes[-1])
    rows = np.zeros((len(x), len(nodes) + 2))
    each = np.arange(len(x))
    if len(nodes) == 1:
        rows[:, 0] = 1.0
    else:
        ends = np.array(nodes, dtype=float)
        after = np.clip(np.searchsorted(ends, x), 1, len(nodes) - 1)
        share = (x - ends[after - 1]) / (ends[after] - ends[after - 1])
        rows[each, after - 1], rows[each, after] = 1 - share, share
    units = (np.array(contexts, dtype=float) - BASE_CONTEXT) / _CONTEXT_UNIT
    rows[:, -2], rows[:, -1] = units, units * (x - nodes[0])
    return rows


def precision_of(nodes: Sequence[float], prior: Prior) -> Array:
    """Of the difference between the coefficients and their prior means."""
    count, values = len(nodes), prior.values
    first = values[0]
    rows = [_unit(count, {0: 1 / (prior.level_sd * first)})]
    if prior.is_multiple:
        steps = (_unit(count, {i: -1 / values[i], i + 1: 1 / values[i + 1]}) for i in range(count - 1))
        rows += [step / prior.step_sd for step in steps]
    elif count > 1:
        rows.append(_unit(count, {0: -1.0, 1: 1.0}) / (prior.step_sd * first))
    for i in range(1, count - 1 if not prior.is_multiple else 0):
        before, after = nodes[i] - nodes[i - 1], nodes[i + 1] - nodes[i]
        # How far the next value is from where the line before leads to.
        bend = _unit(count, {i - 1: after / before, i: -1 - after / before, i + 1: 1.0})
        rows.append(bend / (_BEND_SD * values[i + 1]))
    rows.append(_unit(count, {count: 1 / (_CONTEXT_SD * first)}))
    rows.append(_unit(count, {count + 1: 1 / (_CONTEXT_EACH_SD * first)}))
    matrix = np.array(rows)
    return matrix.T @ matrix


def _unit(num_nodes: int, entries: dict[int, float]) -> Array:
    row = np.zeros(num_nodes + 2)
    for index, value in entries.items():
        row[index] = value
    return row


def _error_sd(residuals: Array, weights: Array) -> float:
    """Relative, of one time, from the median of the residuals' sizes and the usual one."""
    if not len(residuals):
        return _USUAL_SD
    order = np.argsort(np.abs(residuals))
    reached = np.cumsum(weights[order])
    median = float(np.abs(residuals)[order][int(np.searchsorted(reached, reached[-1] / 2))])
    number = float(reached[-1])
    seen = 1.4826 * median
    return max(math.sqrt((number * seen**2 + _USUAL_TIMES * _USUAL_SD**2) / (number + _USUAL_TIMES)), _LEAST_SD)
