"""The measured speed-up: what the texts of the treatment would have taken in vanilla rounds, over what they took.

Two parts, each from the rounds that know it best. With one vanilla token a round and a sequence, control slices have no
noise of text; their times are compared with the times right before and after them. How many tokens a treatment round
yields is counted over *all* treatment rounds. For group s of strata (number running, context):

    speed-up = ( Σ_s tokens_s · t̄_s / q_s + P ) / ( Σ_s R_s · t̄_s + P )

R_s sequence-rounds of the treatment and tokens_s their tokens, t̄_s its mean time of a round without a prompt, q_s that
time over a control round's (time_ratio.py), P the time that reading prompts added, which is the same in both arms. So
every group has the weight that it has in the traffic.

The interval: blocks are the unit of the times, stretches between two blocks the unit of the texts, and t has the
degrees of freedom of Satterthwaite (1946). It holds for one window of time chosen beforehand. Who looks every minute
until an interval leaves 1 will see that happen by chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from alphaloop.acceptance import Interval
from alphaloop.switchback.load_law import Floats
from alphaloop.switchback.slices import Phase, Slice, Stratum
from alphaloop.switchback.strata import collapsed, compared_blocks
from alphaloop.switchback.student import t95
from alphaloop.switchback.time_ratio import TimeRatios, time_ratios

#: Blocks below which nothing is estimated, and below which a group of strata does not stand alone.
LEAST_BLOCKS: Final = 8
#: A difference that nobody would act on.
_NEGLIGIBLE: Final = 0.02


class Verdict(StrEnum):
    """What may be said."""

    FASTER = "faster"  #: speculation is faster than vanilla
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"  #: the interval lies within 2 % of 1
    NO_VERDICT_YET = "no_verdict_yet"


@dataclass(frozen=True, slots=True)
class MeasuredSpeedup:
    """How many times faster a task's texts come with speculation, and the evidence. 95 % bounds."""

    speedup: Interval | None  #: None before there are eight blocks
    decoding: Interval | None  #: the same without the reading of prompts
    num_blocks: int
    num_control_rounds: int
    degrees_of_freedom: float
    verdict: Verdict


def measured_speedup(slices: Iterable[Slice]) -> MeasuredSpeedup:
    """The speed-up of the treatment that these slices are of: one task, and one drafter or all it used.

    Give it all slices of a window of time, those between the blocks too. Between 0 and infinity; noise-free data give
    the ratio exactly.
    """
    found = list(slices)
    blocks = compared_blocks(found)
    num_control_rounds = sum(block.control.num_rounds for block in blocks)
    if len(blocks) < LEAST_BLOCKS:
        return MeasuredSpeedup(None, None, len(blocks), num_control_rounds, 0.0, Verdict.NO_VERDICT_YET)
    treated = [one for one in found if one.phase is not Phase.CONTROL]
    group_of = collapsed(blocks, (one.stratum for one in treated), least_blocks=LEAST_BLOCKS)
    groups = [group_of[block.stratum] for block in blocks]
    texts = _Texts(treated, group_of)
    times = time_ratios(blocks, groups, texts.mean_proposed.tolist())
    parts = _Parts.of(texts, times, groups)
    whole, degrees_of_freedom = parts.interval(texts.prompt_s)
    return MeasuredSpeedup(
        whole, parts.interval(0.0)[0], len(blocks), num_control_rounds, degrees_of_freedom, verdict_of(whole)
    )


class _Texts:
    """What all treatment rounds came to, by stretch of time and group. A stretch ends where the next block begins."""

    def __init__(self, treated: Sequence[Slice], group_of: Mapping[Stratum, int]) -> None:
        num_groups = max(group_of.values()) + 1
        begins: dict[str, float] = defaultdict(lambda: math.inf)
        for one in treated:
            begins[one.block_id] = min(begins[one.block_id], one.started_at.timestamp())
        order = {block_id: index for index, block_id in enumerate(sorted(begins, key=lambda name: begins[name]))}
        # [stretches, groups]; rounds with a prompt belong to the tokens, and their proposals are not counted.
        self.tokens, self.rounds, self.plain_rounds, self.proposed = (
            np.zeros((len(order), num_groups)) for _ in range(4)
        )
        plain_s = np.zeros(num_groups)
        whole_s = 0.0
        for one in treated:
            at = order[one.block_id], group_of[one.stratum]
            self.tokens[at] += one.num_tokens + one.num_prompt_tokens
            self.rounds[at] += one.num_sequence_rounds + one.num_prompt_sequence_rounds
            self.plain_rounds[at] += one.num_sequence_rounds
            self.proposed[at] += one.num_proposed
            plain_s[at[1]] += one.sequence_s
            whole_s += one.sequence_s + one.prompt_sequence_s
        plain_rounds = np.maximum(self.plain_rounds.sum(axis=0), 1)
        self.round_s: Floats = plain_s / plain_rounds  # [groups]
        self.mean_proposed: Floats = self.proposed.sum(axis=0) / plain_rounds
        self.prompt_s = max(0.0, whole_s - float(self.rounds.sum(axis=0) @ self.round_s))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Sequence-seconds, and the variances of their ratio's numerator at a denominator that is held."""

    vanilla_s: float
    treatment_s: float
    variance_of_times: float
    variance_of_texts: float
    degrees_of_times: float
    degrees_of_texts: float

    @classmethod
    def of(cls, texts: _Texts, times: TimeRatios, groups: Sequence[int]) -> _Parts:
        """Linearised: see `time_ratios` for the blocks, Cochran 1977, §6.4, for a ratio over stretches."""
        vanilla_s = texts.tokens * texts.round_s / times.ratio  # [stretches, groups]
        moved = -(times.influence @ vanilla_s.sum(axis=0))  # [blocks]
        of_times = float(moved @ moved)
        degrees_of_times = _degrees_of_freedom(moved, times.weight, np.asarray(groups))
        # More proposals than usual make longer rounds too: what they yield is set against what they take.
        extra = texts.proposed - texts.plain_rounds * texts.mean_proposed
        treatment_s = (texts.rounds + times.token_cost / times.ratio * extra) * texts.round_s
        speedup = float(vanilla_s.sum() / treatment_s.sum())
        residual = (vanilla_s - speedup * treatment_s).sum(axis=1)
        num = len(residual)
        return cls(
            vanilla_s=float(vanilla_s.sum()),
            treatment_s=float(treatment_s.sum()),
            variance_of_times=of_times,
            variance_of_texts=_serial_variance(residual) * num / max(num - 1, 1),
            degrees_of_times=degrees_of_times,
            degrees_of_texts=float(max(num - 1, 1)),
        )

    def interval(self, prompt_s: float) -> tuple[Interval, float]:
        """The speed-up with this much time of reading prompts in both arms, and its degrees of freedom."""
        ratio = (self.vanilla_s + prompt_s) / (self.treatment_s + prompt_s)
        variance = self.variance_of_times + self.variance_of_texts
        uncertain = (
            self.variance_of_times**2 / self.degrees_of_times + self.variance_of_texts**2 / self.degrees_of_texts
        )
        degrees_of_freedom = variance**2 / uncertain if uncertain else math.inf
        margin = t95(degrees_of_freedom) * math.sqrt(variance) / (self.vanilla_s + prompt_s)
        return Interval(ratio, ratio * math.exp(-margin), ratio * math.exp(margin)), degrees_of_freedom


def _degrees_of_freedom(moved: Floats, weight: Floats, group: NDArray[np.int_]) -> float:
    """Satterthwaite's, of a sum over groups; each has its effective number of blocks (Kish 1965), less one."""
    whole = uncertain = 0.0
    for index in set(group.tolist()):
        own, its = moved[group == index], weight[group == index]
        variance, num_effective = float(own @ own), float(its.sum() ** 2 / (its @ its))
        whole += variance
        uncertain += variance**2 / max(num_effective - 1, 0.25)
    return whole**2 / uncertain if uncertain else math.inf


def _serial_variance(residual: Floats) -> float:
    """Of a sum whose neighbours may be alike, because a text can run through two stretches; never below the plain."""
    return float(residual @ residual) + 2 * max(0.0, float(residual[1:] @ residual[:-1]))


def verdict_of(found: Interval) -> Verdict:
    """What may be said of a speed-up with these 95 % bounds."""
    if found.low >= 1 - _NEGLIGIBLE and found.high <= 1 + _NEGLIGIBLE:
        return Verdict.NO_DIFFERENCE
    if found.low > 1:
        return Verdict.FASTER
    return Verdict.SLOWER if found.high < 1 else Verdict.NO_VERDICT_YET
