"""How wrong expected speed-ups were, and what that says of the next one. Pure.

The error of a pair is e = ln(measured / expected), with the expectation before any correction. For pair i of task j of
one drafter on one device

    e_ij = θ_j + ε_ij      θ_j ~ N(μ, τ²)      ε_ij ~ N(0, σ² + v_ij)      μ ~ N(0, 0.03²)

v_ij is the variance that the expectation and the measurement state themselves. So θ_j is the bias of a task, and σ is
what the bounds did not know of. An older pair counts less. The posterior is a sum over a grid of σ and τ. So a few
pairs that agree correct an expectation, and pairs that contradict each other widen it: a random-effects meta-analysis
with the predictive distribution of a new study (Higgins, Thompson and Spiegelhalter 2009).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from alphaloop.experiment.figures import ExpectationPair, SpeedupSubject

#: Pairs of a task and drafter that count: the newest.
MOST_PAIRS: Final = 32
#: Standard deviation of a drafter's bias over all tasks, before any pair.
_PRIOR_BIAS: Final = 0.03
#: Values of σ and of τ. The prior halves from one to the next, so that thin evidence changes little: without a pair an
#: expectation has a standard deviation of .09 beside its own, and one pair moves it by at most half of its error.
_STEPS: Final = np.arange(5)
_SIGMAS: Final = 0.02 * 2.0**_STEPS
_TAUS: Final = _SIGMAS / 2
_PRIOR: Final = -math.log(2.0) * np.add.outer(_STEPS, _STEPS).ravel()  # [grid]
_VAR_SIGMA: Final = np.repeat(_SIGMAS**2, len(_STEPS))
_VAR_TAU: Final = np.tile(_TAUS**2, len(_STEPS))
#: Each pair of a task and drafter counts half, because it resembles the next: they share evidence and load. After this
#: many newer pairs it counts half again, so that a change shows. Chosen by simulation (docs/concepts/expectations.md).
_OF_A_PAIR: Final = 0.5
_RECENT_PAIRS: Final = 8.0
#: A weight is never 0, which would leave a task without a mean.
_MOST_HALVINGS: Final = 60.0
#: Errors move slowly, and a fit takes a third of a millisecond.
_LASTS: Final = timedelta(minutes=1)

Floats = NDArray[np.float64]


class ExpectationError(NamedTuple):
    """What earlier pairs say of the next expectation: ln(true speed-up / expected) has this mean and deviation."""

    bias: float = 0.0
    sd: float = 0.0

    @property
    def factor(self) -> float:
        """Times the expected speed-up is the corrected one."""
        return math.exp(self.bias)


#: Nothing is corrected, and no bound is widened.
NO_ERROR: Final = ExpectationError()


@dataclass(frozen=True, slots=True)
class _Fit:
    at: datetime
    of_tasks: dict[str, ExpectationError]
    of_others: ExpectationError  #: of a task without a pair


class ExpectationErrors:
    """Pairs of one target, engine and device in memory, and the errors that follow. Threads may share it."""

    def __init__(self, half_life: timedelta, pairs: Iterable[ExpectationPair] = ()) -> None:
        self._half_life = half_life
        self._lock = threading.Lock()
        self._held: dict[str, dict[tuple[SpeedupSubject, datetime], ExpectationPair]] = {}  # by drafter
        self._fits: dict[str, _Fit] = {}
        self.add(pairs)

    def add(self, pairs: Iterable[ExpectationPair]) -> None:
        """Hold these pairs; one that is held already changes nothing."""
        with self._lock:
            for pair in pairs:
                held = self._held.setdefault(pair.subject.drafter, {})
                name = pair.subject, pair.covers_from
                if held.get(name) != pair:
                    held[name] = pair
                    self._fits.pop(pair.subject.drafter, None)

    def of(self, task: str, drafter: str, now: datetime) -> ExpectationError:
        """The error of the next expectation of a drafter in a task."""
        with self._lock:
            fit = self._fits.get(drafter)
            if fit is None or not timedelta(0) <= now - fit.at < _LASTS:
                fit = self._fits[drafter] = self._fitted(drafter, now)
        return fit.of_tasks.get(task, fit.of_others)

    def _fitted(self, drafter: str, now: datetime) -> _Fit:
        by_task: dict[str, list[ExpectationPair]] = {}
        held = self._held.get(drafter, {})
        for pair in sorted(held.values(), key=lambda pair: pair.covers_to, reverse=True):
            by_task.setdefault(pair.subject.task, []).append(pair)
        kept = [pair for pairs in by_task.values() for pair in pairs[:MOST_PAIRS]]
        fade = [
            _weight(pair, number, now, self._half_life)
            for pairs in by_task.values()
            for number, pair in enumerate(pairs[:MOST_PAIRS])
        ]
        self._held[drafter] = {(pair.subject, pair.covers_from): pair for pair in kept}
        names = list(by_task)
        *of_tasks, of_others = _errors(kept, names, np.array(fade))
        return _Fit(now, dict(zip(names, of_tasks, strict=True)), of_others)


def _weight(pair: ExpectationPair, num_newer: int, now: datetime, half_life: timedelta) -> float:
    age: float = max(now - pair.covers_to, timedelta(0)) / half_life
    halvings: float = min(num_newer / _RECENT_PAIRS + age, _MOST_HALVINGS)
    return _OF_A_PAIR * math.exp2(-halvings)


def _errors(pairs: Sequence[ExpectationPair], tasks: Sequence[str], fade: Floats) -> list[ExpectationError]:
    """The error of each task, and last that of a task without a pair. `fade` is the weight of each pair."""
    error = np.array([pair.log_error for pair in pairs])  # [pairs]
    stated = np.array([pair.variance for pair in pairs])
    is_of = np.array([[float(pair.subject.task == task) for task in tasks] for pair in pairs])
    is_of = is_of.reshape(len(pairs), len(tasks))
    variance = stated + _VAR_SIGMA[:, None]  # [grid, pairs]
    weight = fade / variance
    held = weight @ is_of  # [grid, tasks]
    mean = (weight * error) @ is_of / held
    shared = held / (1 + _VAR_TAU[:, None] * held)  # what a task says of μ
    total = shared.sum(axis=1) + 1 / _PRIOR_BIAS**2
    centre = (shared * mean).sum(axis=1) / total
    log_weight = _PRIOR - 0.5 * (
        (fade * np.log(variance)).sum(axis=1)
        + (weight * error**2).sum(axis=1)
        - (held * mean**2).sum(axis=1)
        - np.log(shared / held).sum(axis=1)
        + (shared * mean**2).sum(axis=1)
        - centre**2 * total
        + np.log(total)
    )
    probability = np.exp(log_weight - log_weight.max())
    probability /= probability.sum()
    own = held * _VAR_TAU[:, None] / (1 + held * _VAR_TAU[:, None])  # share of a task's own pairs in its bias
    bias = own * mean + (1 - own) * centre[:, None]
    spread = _VAR_TAU[:, None] * (1 - own) + (1 - own) ** 2 / total[:, None] + _VAR_SIGMA[:, None]
    bias = np.column_stack([bias, centre])
    spread = np.column_stack([spread, _VAR_TAU + 1 / total + _VAR_SIGMA])
    return [_mixture(probability, bias[:, i], spread[:, i]) for i in range(len(tasks) + 1)]


def _mixture(probability: Floats, mean: Floats, variance: Floats) -> ExpectationError:
    """Mean and standard deviation over the grid."""
    bias = float(probability @ mean)
    return ExpectationError(bias, math.sqrt(float(probability @ (variance + (mean - bias) ** 2))))
