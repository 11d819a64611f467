"""Quantiles of Student's t distribution, for degrees of freedom that need not be whole."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Final

#: Beyond it the normal quantile is right to four digits.
_NEARLY_NORMAL: Final = 1e5
_TINY: Final = 1e-300


def t95(degrees_of_freedom: float) -> float:
    """The t that a variate with so many degrees of freedom exceeds in absolute value in 5 % of cases."""
    return t_quantile(degrees_of_freedom, 0.05)


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, tail: float) -> float:
    """The t that such a variate exceeds in absolute value with the probability `tail`.

    Infinite without a degree of freedom. By bisection on the tail, I_x(ν/2, ½) with x = ν / (ν + t²) (DLMF 8.17).
    """
    if degrees_of_freedom <= 0:
        return math.inf
    if degrees_of_freedom >= _NEARLY_NORMAL:
        return NormalDist().inv_cdf(1 - tail / 2)
    low, high = 0.0, 1.0
    while two_sided_tail(high, degrees_of_freedom) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if two_sided_tail(middle, degrees_of_freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def two_sided_tail(t: float, degrees_of_freedom: float) -> float:
    """P(|T| > t)."""
    return _incomplete_beta(degrees_of_freedom / (degrees_of_freedom + t * t), degrees_of_freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction (DLMF 8.17.22) in the half where that converges quickly."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d₁/(1 + d₂/(1 + …))), by Lentz's method as modified by Thompson and Barnett (1986)."""
    value = numerator = 1.0
    denominator = 0.0
    for i in range(500):
        m = i // 2
        if i == 0:
            d = 1.0
        elif i % 2 == 0:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        denominator = 1 / _away_from_zero(1 + d * denominator)
        numerator = _away_from_zero(1 + d / numerator)
        step = numerator * denominator
        value *= step
        if i and abs(step - 1) < 1e-14:
            break
    return value - 1


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
