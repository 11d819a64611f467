"""What the blocks came to: tokens a second of each policy, and how sure the ratio to the better static one is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.engines.closed_loop import Played
from benchmarks.engines.workload import Block

VANILLA, SPECULATIVE, ROUTED = "vanilla", "speculative", "routed"
POLICIES: Final = (VANILLA, SPECULATIVE, ROUTED)
NUM_RESAMPLES: Final = 4000


@dataclass(frozen=True, slots=True)
class PlayedBlock:
    """One block, played by every policy, one behind the other."""

    block: Block
    played: Mapping[str, Played]


def goodput(blocks: Sequence[PlayedBlock], policy: str) -> float:
    """Tokens a second over all blocks."""
    seconds = sum(one.played[policy].seconds for one in blocks)
    return sum(one.played[policy].num_tokens for one in blocks) / seconds


def over_better_static(blocks: Sequence[PlayedBlock]) -> float:
    """Goodput of the routed blocks over that of the static policy that is better on these very blocks."""
    return goodput(blocks, ROUTED) / max(goodput(blocks, VANILLA), goodput(blocks, SPECULATIVE))


def bounds(blocks: Sequence[PlayedBlock], *, seed: int = 0) -> tuple[float, float]:
    """95 % bounds of `over_better_static`: bootstrap over blocks, the better static one chosen anew each time."""
    rng = random.Random(seed)
    found = sorted(over_better_static(rng.choices(blocks, k=len(blocks))) for _ in range(NUM_RESAMPLES))
    return found[int(0.025 * NUM_RESAMPLES)], found[int(0.975 * NUM_RESAMPLES) - 1]


def routes(blocks: Sequence[PlayedBlock]) -> Counter[str]:
    """Jobs that were routed, by what drafted."""
    return Counter(result.drafter or VANILLA for one in blocks for result in one.played[ROUTED].results)


def reasons(blocks: Sequence[PlayedBlock]) -> Counter[str]:
    """Jobs that were routed, by what drafted and why."""
    return Counter(
        f"{result.drafter or VANILLA}: {result.decoding.reason if result.decoding else 'not told'}"
        for one in blocks
        for result in one.played[ROUTED].results
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(blocks: Sequence[PlayedBlock]) -> dict[str, Any]:
    """For the table and the JSON line."""
    low, high = bounds(blocks)
    return {
        "num_blocks": len(blocks),
        "tokens_per_s": {policy: round(goodput(blocks, policy), 2) for policy in POLICIES},
        "routed_over_better_static": round(over_better_static(blocks), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "routes": dict(routes(blocks)),
        "reasons": dict(reasons(blocks).most_common()),
    }


def by_task(blocks: Sequence[PlayedBlock]) -> dict[str, dict[str, Any]]:
    """Of each task, tokens a second of each policy and where its jobs were routed."""
    found: dict[str, dict[str, Any]] = {}
    for task in sorted({one.block.task for one in blocks}):
        own = [one for one in blocks if one.block.task == task]
        found[task] = {policy: round(goodput(own, policy), 2) for policy in POLICIES} | {"routes": dict(routes(own))}
    return found
