"""A normal posterior of how far drafts go, in logits by position, and its update by counts.

    logit s_i = m_i + b_i·δ + ε_i      δ ~ N(0, common_var), ε_i ~ N(0, own_var_i)

s_i = reach_i · α_i is the probability that a round which got through position i - 1 gets through i. All tokens a round
follow from these, and one count, accepts over chances, estimates the product. δ moves all positions together: a task
with high acceptance at the first three positions is expected to have high acceptance at the fourth too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

#: Standard deviation of each position by itself, over that of all positions together.
_OWN_SHARE: Final = 0.3
_NEWTON_STEPS: Final = 12


@dataclass(frozen=True, slots=True)
class Counts:
    """Effective (design effect taken out) accepts and chances by position."""

    accepts: tuple[float, ...]
    chances: tuple[float, ...]

    def scaled(self, factor: float) -> Counts:
        """The same rates from so many times as much evidence."""
        return Counts(tuple(a * factor for a in self.accepts), tuple(c * factor for c in self.chances))


@dataclass(frozen=True, slots=True)
class Profile:
    """Normal distribution of logit s_i by position: mean, and the factor model above."""

    mean: tuple[float, ...]
    common_var: float
    own_var: tuple[float, ...]
    loading: tuple[float, ...]

    @classmethod
    def around(cls, probabilities: Sequence[float], spread: float) -> Profile:
        """A prior: these s_i, with a standard deviation of `spread` logits."""
        size, own = len(probabilities), (spread * _OWN_SHARE) ** 2
        return cls(tuple(map(logit, probabilities)), spread**2, (own,) * size, (1.0,) * size)

    def widened(self, spread: float) -> Profile:
        """For one of several groups that differ by `spread`. Loadings become 1, each position keeps its variance."""
        shared = min(self.loading, default=1.0) ** 2
        own = (spread * _OWN_SHARE) ** 2
        return Profile(
            self.mean,
            self.common_var * shared + spread**2,
            tuple(
                v + own + self.common_var * (b * b - shared) for v, b in zip(self.own_var, self.loading, strict=True)
            ),
            (1.0,) * len(self.mean),
        )

    def updated(self, counts: Counts) -> Profile:
        """After `counts`: the mode and curvature of the posterior (Laplace), by Newton's method in O(positions).

        Expects loadings of 1. The Hessian is an arrow (δ touches every ε_i), so its Schur complement is one number.
        """
        if not any(counts.chances):
            return self
        size = len(self.mean)
        accepts, chances = fitted(counts.accepts, size), fitted(counts.chances, size)
        common, own = 0.0, [0.0] * size
        prior_var, own_var = max(self.common_var, 1e-9), self.own_var
        for _ in range(_NEWTON_STEPS):
            p = [logistic(m + common + e) for m, e in zip(self.mean, own, strict=True)]
            h = [n * x * (1 - x) for n, x in zip(chances, p, strict=True)]
            r = [a - n * x for a, n, x in zip(accepts, chances, p, strict=True)]
            schur = 1 / prior_var + sum(hi / (1 + hi * v) for hi, v in zip(h, own_var, strict=True))
            rest = sum(hi * (ri * v - e) / (1 + hi * v) for hi, ri, v, e in zip(h, r, own_var, own, strict=True))
            step = clamped((sum(r) - common / prior_var - rest) / schur)
            moved = [
                clamped((ri * v - e - hi * v * step) / (1 + hi * v))
                for e, ri, hi, v in zip(own, r, h, own_var, strict=True)
            ]
            own = [e + more for e, more in zip(own, moved, strict=True)]
            common += step
            if abs(step) < 1e-3 and max(map(abs, moved)) < 1e-3:
                break
        return Profile(
            tuple(m + common + e for m, e in zip(self.mean, own, strict=True)),
            1 / schur,
            tuple(v / (1 + hi * v) for hi, v in zip(h, own_var, strict=True)),
            tuple(1 / (1 + hi * v) for hi, v in zip(h, own_var, strict=True)),
        )

    def probabilities(self, shift: float = 0.0) -> tuple[float, ...]:
        """s_i with δ at `shift` standard deviations."""
        move = shift * math.sqrt(self.common_var)
        return tuple(logistic(m + b * move) for m, b in zip(self.mean, self.loading, strict=True))

    def moved(self, logits: float) -> Profile:
        """All positions better by so many logits."""
        return replace(self, mean=tuple(m + logits for m in self.mean))


def total(groups: Iterable[Counts]) -> Counts:
    accepts: list[float] = []
    chances: list[float] = []
    for group in groups:
        short = len(group.chances) - len(chances)
        accepts += [0.0] * short
        chances += [0.0] * short
        for i, (a, n) in enumerate(zip(group.accepts, group.chances, strict=True)):
            accepts[i] += a
            chances[i] += n
    return Counts(tuple(accepts), tuple(chances))


def fitted(values: Sequence[float], size: int, *, last: bool = False) -> tuple[float, ...]:
    filler = values[-1] if last and values else 0.0
    return (*values, *(filler,) * (size - len(values)))[:size]


def logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def clamped(step: float) -> float:
    return min(max(step, -2.0), 2.0)
