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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from alphaloop.costs import BASE_CONTEXT, PRIOR_SD, LogEstimate

Array: TypeAlias = npt.NDArray[np.float64]

#: Tokens of context in which the two coefficients of context are counted.
_CONTEXT_UNIT: Final = 1024
#: Standard deviations at which a time counts half: 95 % as good as least squares where errors are normal.
_CAUCHY: Final = 2.385
NUM_SWEEPS: Final = 6
#: Relative standard deviation of one time before any residual was seen, and the times that this is worth.
_USUAL_SD, _USUAL_TIMES = 0.15, 8
_LEAST_SD: Final = 0.02
#: Least share of the shortest time seen that the line may put a time at, far from what was seen.
LEAST_SHARE: Final = 0.5
#: Doubt of a value is never more: within a factor of 3.2 with 95 %.
MOST_SD: Final = 0.6
#: Standard deviation of a bend, as a share of the time at its node.
_BEND_SD: Final = 0.2
#: Standard deviations of the coefficients of context, as shares of the time at the first node.
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
    #: Prior sd of the step from the first node to the second, as a share of the first value; if `is_multiple`, of every
    #: step.
    step_sd: float
    is_multiple: bool = False  #: whether the law is about a multiple of `values`, rather than as straight
    context: float = 0.0
    context_each: float = 0.0


#: Values of θ, all as likely with nothing known.
_SLOPES: Final = np.linspace(0.0, 2.0, 17)
_PRIOR: Final = np.full(len(_SLOPES), 1 / len(_SLOPES))


@dataclass(frozen=True, slots=True)
class Law:
    """A fitted law; with `vanilla`, of a route at every draft length.

        ms(k) = V + w(k) · (L - V)        w(k) = max(0, 1 - θ · (1 - k / K))        L where L < V

    L is a round at the route's longest draft K, and V one of the vanilla route, to which such a server belongs. Both
    are laws over requests in flight and context. A round of k drafts is a pass of k + 1 positions, so at θ = 1 time
    grows evenly with the width, from V to L. θ = 0 is a server on which every length takes as long as the longest,
    because the pass reads weights or drafting itself takes the time; θ > 1 one on which short drafts cost hardly more
    than none. With nothing known θ is anywhere between 0 and 2. Time never falls with k.

    Given θ, L is a linear regression. θ is summed over: each of a row of values has a law of its own, weighed by how
    likely it makes the times (its marginal likelihood). The law's value is their mean, with the variance of all
    together: requests of one length alone leave it open whether L is long or θ is. V is taken as it is known. Its doubt
    counts in the variance of short drafts.
    """

    nodes: tuple[float, ...]  #: where L may bend
    weights: Array  #: of each θ; of a law without `vanilla` one
    coefficients: Array  #: of L, one row for each θ, or one for all
    covariances: npt.NDArray[np.floating]  #: of the coefficients, one matrix for each row
    least_ms: float  #: a shorter L is not believed
    vanilla: Law | None = None

    def at(self, size: float, context: float = BASE_CONTEXT, *, length: float = 1.0) -> LogEstimate:
        """ln(milliseconds) and its variance, at that share of the longest draft."""
        (row,) = rows_of(self.nodes, [size], [context])
        each_ms = np.maximum(self.coefficients @ row, self.least_ms)
        variances = self.covariances @ row @ row
        if self.vanilla is not None:
            vanilla = self.vanilla.at(size, context)
            vanilla_ms = math.exp(vanilla.mean)
            shares = np.where(each_ms > vanilla_ms, _shares(_SLOPES, length), 1.0)
            each_ms = vanilla_ms + shares * (each_ms - vanilla_ms)
            variances = shares**2 * variances + ((1.0 - shares) * vanilla_ms) ** 2 * vanilla.variance
        ms = float(self.weights @ each_ms)
        variance = float(self.weights @ (variances + (each_ms - ms) ** 2))
        return LogEstimate(math.log(ms), min(variance / ms**2, MOST_SD**2))

    def as_prior(self, ratio: float, level_sd: float, step_sd: float) -> Prior:
        """The prior of something that takes about `ratio` times as long, from a law without `vanilla`."""
        coefficients, count = self.coefficients[0].tolist(), len(self.nodes)
        values = tuple(ratio * max(value, self.least_ms) for value in coefficients[:count])
        context, context_each = (ratio * value for value in coefficients[count:])
        return Prior(values, level_sd, step_sd, True, context, context_each)


def usual(nodes: Sequence[float], shape: Sequence[float], times: Sequence[Time], slope_sd: float) -> Prior:
    """The prior without a reference: the shape, at the level of the times, at least one; hardly sure of either."""
    levels = sorted(time.ms / float(np.interp(time.size, nodes, shape)) for time in times)
    level = levels[len(levels) // 2]
    values = tuple(level * value for value in shape)
    return Prior(values, 1.0, slope_sd, context=_CONTEXT_MEAN * values[0])


def fitted(
    nodes: Sequence[float], times: Sequence[Time], prior: Prior, half_life: float, vanilla: Law | None = None
) -> Law:
    """The law after `times`, the latest last. Without any it is the prior, which is that of the longest draft."""
    nodes = tuple(nodes)
    mean = np.array([*prior.values, prior.context, prior.context_each])
    precision = precision_of(nodes, prior)
    least_ms = LEAST_SHARE * min([time.ms for time in times] or [min(prior.values)])
    unknown: Array = np.ones(1) if vanilla is None else _PRIOR
    if not times:
        return Law(nodes, unknown, mean[None], np.linalg.inv(precision)[None], least_ms, vanilla)
    rows = rows_of(nodes, [time.size for time in times], [time.context for time in times])
    ms, vanilla_ms = np.array([time.ms for time in times]), np.zeros(len(times))
    slopes: npt.NDArray[np.floating] = _SLOPES[:1]  # times of the longest draft say nothing of θ
    if vanilla is not None and any(time.length < 1 for time in times):
        slopes, vanilla_ms = _SLOPES, np.maximum(rows @ vanilla.coefficients[0], vanilla.least_ms)
    shares = _shares(slopes, np.array([time.length for time in times]))  # by θ, then by time
    weighing = Weighing(times, half_life)
    expected, weights, likelihoods = np.maximum(ms, least_ms), unknown, np.zeros(len(slopes))
    coefficients, covariances = np.empty((len(slopes), len(mean))), np.empty((len(slopes), len(mean), len(mean)))
    for _ in range(NUM_SWEEPS):
        precisions = weighing.precisions(expected)
        for i, share in enumerate(shares):
            moves, wanted = rows * share[:, None], ms - (1.0 - share) * vanilla_ms
            known = precision + (moves * precisions[:, None]).T @ moves
            covariances[i] = np.linalg.inv(known)
            coefficients[i] = covariances[i] @ (precision @ mean + moves.T @ (precisions * wanted))
            if len(slopes) > 1:
                missed, moved = wanted - moves @ coefficients[i], coefficients[i] - mean
                likelihoods[i] = -0.5 * (
                    precisions @ missed**2 + moved @ precision @ moved + np.linalg.slogdet(known)[1]
                )
        weights = np.exp(likelihoods - likelihoods.max())
        weights = weights / weights.sum()
        expected = np.maximum(weights @ (vanilla_ms + shares * (coefficients @ rows.T - vanilla_ms)), least_ms)
        weighing.learn((ms - expected) / expected)
    return Law(nodes, weights if len(slopes) > 1 else unknown, coefficients, covariances, least_ms, vanilla)


def _shares(slopes: npt.NDArray[np.floating], length: float | Array) -> Array:
    """w, for each θ."""
    shares: Array = np.maximum(0.0, 1.0 - np.multiply.outer(slopes, 1.0 - length))
    return shares


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
    """The precision of the difference between the coefficients and their prior means."""
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


#: A drafter, or None, the vanilla route.
Route: TypeAlias = str | None

#: Times that are kept, in half-lives: older ones weigh 2^-4.
_KEPT_HALF_LIVES: Final = 4
#: How much the ratio of a route's times to the leading route's changes from one size to the double.
_STEP_SD: Final = 0.2
#: Least seconds between two fits of a law; but the first times of a route count at once.
FITTED_EVERY_S: Final = 1.0
_FIRST_TIMES: Final = 8


@dataclass(frozen=True, slots=True)
class UsualShape:
    """What is assumed of the leading route before any time."""

    nodes: tuple[float, ...]
    values: tuple[float, ...]  #: times at the nodes, in proportion
    slope_sd: float  #: of the change to the second node, as a share of the first value


@dataclass(slots=True)
class _Learned:
    times: deque[Time]
    taken_s: float  #: when the last one was
    num_longest: int = 0  #: times ever taken with the longest draft, those before this process included
    num_shorter: int = 0  #: with a shorter one
    law: Law | None = None
    is_new: bool = False  #: whether times came since the law was fitted
    fitted_s: float = -math.inf


class RouteLaws:
    """The laws of one kind of time, of rounds or of prompts, on the routes to servers in `assumed`.

    `assumed` says what each route takes in proportion, with nothing known. They lean on each other: the
    vanilla route's law stands on its own times, and another route's law a priori follows it, so that a route with few
    requests is known at all loads about as vanilla is. Where vanilla has no times, the route with most of them leads.
    """

    def __init__(self, assumed: Mapping[Route, float], shape: UsualShape, *, half_life: int, now: float) -> None:
        self.nodes: Final = shape.nodes
        self._assumed, self._shape, self._half_life = assumed, shape, half_life
        self._routes = {route: _Learned(deque(maxlen=_KEPT_HALF_LIVES * half_life), now) for route in assumed}

    def take(self, route: Route, taken: Time, now: float) -> None:
        """A time of a request."""
        learned = self._routes[route]
        learned.times.append(taken)
        learned.num_shorter += taken.length < 1
        learned.num_longest += taken.length >= 1
        learned.is_new, learned.taken_s = True, now

    def take_stored(self, route: Route, taken: Time, num_times: int) -> None:
        """A value from before, that rested on `num_times` times; before any request."""
        learned = self._routes[route]
        learned.times.append(taken)
        if taken.length < 1:
            learned.num_shorter = max(learned.num_shorter, num_times)
        else:
            learned.num_longest = max(learned.num_longest, num_times)
        learned.is_new = True

    def fit(self, now: float, *, pause_s: float = FITTED_EVERY_S) -> bool:
        """Fit anew where times came and `pause_s` have passed; whether any law may have changed.

        The first times of a route do not wait.
        """
        if not any(self._is_due(learned, now, pause_s) for learned in self._routes.values()):
            return False
        first, half_life = self._leading(), self._half_life
        times = {route: list(learned.times) for route, learned in self._routes.items()}
        priors = {first: usual(self.nodes, self._shape.values, times[first], self._shape.slope_sd)}
        lead = fitted(self.nodes, times[first], priors[first], half_life)
        for route in self._routes.keys() - {first}:
            priors[route] = lead.as_prior(self._assumed[route] / self._assumed[first], PRIOR_SD, _STEP_SD)
        vanilla = lead if first is None else fitted(self.nodes, times[None], priors[None], half_life)
        for route, learned in self._routes.items():
            is_vanilla = route is None
            learned.law = vanilla if is_vanilla else fitted(self.nodes, times[route], priors[route], half_life, vanilla)
            learned.is_new, learned.fitted_s = False, now
        return True

    def law(self, route: Route) -> Law | None:
        """As last fitted; None while no route has times."""
        return self._routes[route].law

    def num_times(self, route: Route, *, length: float = 1.0) -> int:
        """Times that its law rests on: of the longest draft, or of shorter ones."""
        learned = self._routes[route]
        return learned.num_longest if length >= 1 else learned.num_shorter

    def seconds_unused(self, route: Route, now: float) -> float:
        """Since the last time of the route, or since the beginning."""
        return now - self._routes[route].taken_s

    def _leading(self) -> Route:
        if self._routes[None].times:
            return None
        return max(self._routes, key=lambda route: len(self._routes[route].times))

    @staticmethod
    def _is_due(learned: _Learned, now: float, pause_s: float) -> bool:
        is_first = learned.num_longest + learned.num_shorter < _FIRST_TIMES
        return learned.is_new and (is_first or now - learned.fitted_s >= pause_s)


def loads_up_to(most: int) -> Sequence[int]:
    """1, 2, 4 … and `most`."""
    loads = [1]
    while 2 * loads[-1] < most:
        loads.append(2 * loads[-1])
    return loads if most <= 1 else [*loads, most]
