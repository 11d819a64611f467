"""Comparisons of the same prompts decoded twice: a probe run with an earlier one.

Pairing removes the variance between prompts, by far the largest one, so a few prompts are as precise as hundreds of
unpaired jobs. Intervals are Student's over linearised ratios (Cochran 1977, §6.4), with one degree of freedom less than
prompts. The unit is the prompt, because tokens inside a prompt are correlated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alphaloop.acceptance import Interval
from alphaloop.switchback.student import t95


@dataclass(frozen=True, slots=True)
class PromptPair:
    """Trials and accepts of position 1 on one prompt, before and after."""

    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int


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


def _margin(influences: Sequence[float]) -> float:
    num = len(influences)
    if num < 2:
        return math.inf
    variance = num / (num - 1) * sum(influence * influence for influence in influences)
    return t95(num - 1) * math.sqrt(variance)
