"""The rule of `alphaloop measure` over simulated prompts: bounds of the ratio of all tokens, and what it ships."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from alphaloop.payoff.figures import PromptBlock, RatioBounds, ShipVerdict, judge, total_bounds
from benchmarks.truth.coverage import Coverage, Shown, coverage

Floats: TypeAlias = NDArray[np.float64]

_NUM_PRODUCERS: Final = 6
_MANY: Final = 400_000


def rows(num_jobs: int, num_runs: int, seed: int) -> Iterator[tuple[Coverage, int]]:
    """Coverage of vanilla against vanilla and of 1.2x, and how often a bar of 1 shipped what is no faster."""
    for speedup in (1.0, 1.2):
        truth = _true_ratio(speedup)
        draws = np.random.default_rng([seed, num_jobs, round(10 * speedup)])
        found = [_bounds(draws, num_jobs, speedup) for _ in range(num_runs)]
        shipped = sum(judge(bounds, 1.0, 1).verdict is ShipVerdict.SHIP for bounds in found)
        case = f"{speedup:.1f}x, slow minutes, producers"
        yield (
            coverage("measure", case, num_jobs, (Shown(bounds.low, bounds.high, truth) for bounds in found)),
            shipped if truth <= 1 else 0,
        )


def _bounds(draws: np.random.Generator, num_jobs: int, speedup: float) -> RatioBounds:
    """A prompt a block. The host is slow for some prompts, in both arms alike but for the moment it changes."""
    tokens, ratios = _texts(draws, num_jobs, speedup)
    slow = np.where(draws.random(num_jobs) < 0.25, draws.uniform(1.5, 4.0, num_jobs), 1.0)
    noise = 0.04 * draws.standard_normal((2, num_jobs))
    changes = np.where(draws.random(num_jobs) < 0.03, draws.uniform(1.5, 3.0, num_jobs), 1.0)
    vanilla_s = 0.01 * tokens * slow * np.exp(noise[0])
    ours_s = 0.01 * tokens / ratios * slow * np.exp(noise[1])
    is_first = draws.random(num_jobs) < 0.5  # which arm ran first is drawn, as `measure` draws it
    vanilla_s, ours_s = vanilla_s * np.where(is_first, changes, 1.0), ours_s * np.where(is_first, 1.0, changes)
    return total_bounds(_blocks(tokens, ours_s), _blocks(tokens, vanilla_s))


def _blocks(tokens: Floats, wall_s: Floats) -> list[PromptBlock]:
    return [PromptBlock(int(num), float(one)) for num, one in zip(tokens, wall_s, strict=True)]


def _texts(draws: np.random.Generator, num: int, speedup: float) -> tuple[Floats, Floats]:
    """Tokens of each answer, and how many times faster it comes; prompts of a producer gain alike."""
    tokens = np.clip(np.rint(draws.lognormal(math.log(60), 0.6, num)), 8, 256)
    if speedup == 1.0:
        return tokens, np.ones(num)
    gain = np.linspace(-0.15, 0.15, _NUM_PRODUCERS)[draws.integers(_NUM_PRODUCERS, size=num)]
    return tokens, speedup * np.exp(gain + 0.15 * draws.standard_normal(num))


def _true_ratio(speedup: float) -> float:
    tokens, ratios = _texts(np.random.default_rng(0), _MANY, speedup)
    return float(tokens.sum() / (tokens / ratios).sum())
