"""Forced runs: the same prompts decoded vanilla and speculatively, one behind the other, and their ratio. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.acceptance import Interval
from alphaloop.intervals import t_quantile

#: Fewer pairs of blocks give no interval.
LEAST_BLOCKS: Final = 4


@dataclass(frozen=True, slots=True)
class ForcedBlock:
    """The same jobs of one task in both arms: seconds from the start of decoding to the last token, and tokens."""

    vanilla_s: float
    vanilla_tokens: int
    drafted_s: float
    drafted_tokens: int


def forced_speedup(blocks: Sequence[ForcedBlock], confidence: float) -> Interval | None:
    """Seconds a token, vanilla over speculative, of all blocks together; None with too few.

    The bounds leave out one block at a time (jackknife of the logarithm), with Student's t.
    """
    number = len(blocks)
    if number < LEAST_BLOCKS:
        return None
    whole = _log_ratio(blocks)
    without = [_log_ratio([*blocks[:i], *blocks[i + 1 :]]) for i in range(number)]
    mean = sum(without) / number
    error = math.sqrt((number - 1) / number * sum((one - mean) ** 2 for one in without))
    half = t_quantile(number - 1, 1 - confidence) * error
    return Interval(math.exp(whole), math.exp(whole - half), math.exp(whole + half))


def agree(shown: Interval, forced: Interval) -> bool:
    """Whether the difference of two independent figures may be chance: within the root of their squared half-widths."""
    higher, lower = (shown, forced) if shown.mean > forced.mean else (forced, shown)
    doubt = math.hypot(math.log(higher.mean / higher.low), math.log(lower.high / lower.mean))
    return math.log(higher.mean / lower.mean) <= doubt


def _log_ratio(blocks: Sequence[ForcedBlock]) -> float:
    vanilla = sum(one.vanilla_s for one in blocks) / sum(one.vanilla_tokens for one in blocks)
    drafted = sum(one.drafted_s for one in blocks) / sum(one.drafted_tokens for one in blocks)
    return math.log(vanilla / drafted)
