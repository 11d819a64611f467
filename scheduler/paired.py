"""Comparisons of the same prompts decoded twice: a probe run with an earlier one, a probe with its vanilla twin.

Pairing takes the difference between prompts, by far the largest variance, out of the comparison, so a handful of
prompts says what hundreds of unpaired jobs would. Intervals are Student's, with one degree of freedom less than there
are prompts, over linearised ratios (Cochran 1977, §6.4): prompts are the unit, tokens inside a prompt are correlated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.acceptance import Z95, Interval

# Student's t, 97.5 % quantile, for 1 to 30 degrees of freedom.
T975: Final = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


@dataclass(frozen=True, slots=True)
class PromptPair:
    """Trials and accepts of position 1 on one prompt, before and after."""

    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int


@dataclass(frozen=True, slots=True)
class CostPair:
    """Tokens and device seconds of two ways to decode; either one prompt's, or one job's with the other side zero."""

    tokens: float
    device_s: float
    control_tokens: float
    control_device_s: float


def alpha_change(pairs: Sequence[PromptPair]) -> Interval | None:
    """Change of α_1 from before to after, with its 95 % interval; None when either side was never tested.

    With a single prompt nothing is known about the spread, and the interval is the whole range.
    """
    trials_before, trials_after = sum(p.trials_before for p in pairs), sum(p.trials_after for p in pairs)
    if not trials_before or not trials_after:
        return None
    before = sum(p.accepts_before for p in pairs) / trials_before
    after = sum(p.accepts_after for p in pairs) / trials_after
    influences = [
        (p.accepts_after - after * p.trials_after) / trials_after
        - (p.accepts_before - before * p.trials_before) / trials_before
        for p in pairs
    ]
    margin = _margin(influences)
    change = after - before
    return Interval(change, max(-1.0, change - margin), min(1.0, change + margin))


def speedup(pairs: Sequence[CostPair]) -> Interval | None:
    """Tokens a device second over the control's, with a 95 % interval by the delta method on the logarithm.

    None without tokens on both sides. Unpaired jobs are passed with zeros on the side they are not on: the influence
    of each is then its own side's.
    """
    tokens, control_tokens = sum(p.tokens for p in pairs), sum(p.control_tokens for p in pairs)
    seconds, control_seconds = sum(p.device_s for p in pairs), sum(p.control_device_s for p in pairs)
    if min(tokens, control_tokens, seconds, control_seconds) <= 0:
        return None
    ratio = (tokens / seconds) / (control_tokens / control_seconds)
    influences = [
        p.tokens / tokens
        - p.device_s / seconds
        - p.control_tokens / control_tokens
        + p.control_device_s / control_seconds
        for p in pairs
    ]
    margin = _margin(influences)
    return Interval(ratio, ratio * math.exp(-margin), ratio * math.exp(margin) if margin < 50 else math.inf)


def _margin(influences: Sequence[float]) -> float:
    num = len(influences)
    if num < 2:
        return math.inf
    variance = num / (num - 1) * sum(influence * influence for influence in influences)
    quantile = T975[num - 2] if num - 1 <= len(T975) else Z95
    return quantile * math.sqrt(variance)
