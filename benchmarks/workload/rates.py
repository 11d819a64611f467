"""What the settings come to: tokens a second over many blocks, and ratios with bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from benchmarks.workload.contest import ADAPTIVE, Played

NUM_RESAMPLES: Final = 4000


@dataclass(frozen=True, slots=True)
class Compared:
    """The adaptive worker against the best static setting of the same blocks."""

    best_static: str
    tokens_per_s: float  #: ours
    ratio: float
    low: float  #: 95 % bounds
    high: float
    num_blocks: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def rate(played: Iterable[Played]) -> float:
    """Tokens a second of all these blocks together."""
    pairs = [(one.num_tokens, one.seconds) for one in played]
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def rates(played: Sequence[Played], wanted: Callable[[Played], bool]) -> dict[str, float]:
    """Tokens a second by setting, over the blocks that are `wanted`."""
    by_setting: dict[str, list[Played]] = {}
    for one in played:
        if wanted(one):
            by_setting.setdefault(one.setting, []).append(one)
    return {setting: rate(its) for setting, its in by_setting.items()}


def compare(played: Sequence[Played], wanted: Callable[[Played], bool], *, against: str | None = None) -> Compared:
    """Ratio of total tokens a second; bounds by resampling whole blocks, every setting's share of a block together.

    `against` names the static setting; without it, it is the best over these very blocks, which is chosen with
    hindsight. Percentile bootstrap of a ratio of totals (Efron 1979).
    """
    found = rates(played, wanted)
    best = against or max((name for name in found if name != ADAPTIVE), key=lambda name: found[name])
    pairs = _by_block(played, wanted, best)
    rng = random.Random(0)
    ratios = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES))
    low, high = ratios[int(0.025 * NUM_RESAMPLES)], ratios[int(0.975 * NUM_RESAMPLES) - 1]
    return Compared(best, found[ADAPTIVE], _ratio(pairs), low, high, len(pairs))


def timed_once(played: Sequence[Played]) -> list[Played]:
    """Every turn with the mean time of all turns that decoded its block with its setting, beside its own deciding.

    Texts are greedy, so such turns are one computation, and what they differ by is the machine's noise: a block where
    the adaptive worker chose the very static setting says nothing but what deciding costs. Common random numbers, as
    simulations call it; what remains uncertain are the blocks where choices differ.
    """
    decoding: dict[tuple[int, str], list[float]] = {}
    for one in played:
        decoding.setdefault((one.block, one.choice), []).append(one.seconds - one.deciding_s)
    return [replace(one, seconds=fmean(decoding[one.block, one.choice]) + one.deciding_s) for one in played]


def hindsight(played: Sequence[Played], wanted: Callable[[Played], bool], static: str) -> float:
    """How much faster than `static` it is to decode each task of each phase with its own best static setting.

    Chosen after the fact, so noise counts in its favour: no rule that switches between these settings does better.
    """
    chosen = [one for one in played if one.setting != ADAPTIVE and wanted(one)]
    num_tokens, seconds = 0, 0.0
    for phase, task in dict.fromkeys((one.phase, one.task) for one in chosen):
        here = [one for one in chosen if (one.phase, one.task) == (phase, task)]
        found = rates(here, lambda _: True)
        best = max(found, key=lambda name: found[name])
        its = [one for one in here if one.setting == best]
        num_tokens += sum(one.num_tokens for one in its)
        seconds += sum(one.seconds for one in its)
    return num_tokens / seconds / rates(chosen, lambda _: True)[static]


def _by_block(played: Sequence[Played], wanted: Callable[[Played], bool], static: str) -> list[tuple[Played, Played]]:
    ours = {one.block: one for one in played if one.setting == ADAPTIVE and wanted(one)}
    theirs = {one.block: one for one in played if one.setting == static and wanted(one)}
    return [(ours[block], theirs[block]) for block in sorted(ours)]


def _ratio(pairs: Sequence[tuple[Played, Played]]) -> float:
    return rate(ours for ours, _ in pairs) / rate(theirs for _, theirs in pairs)
