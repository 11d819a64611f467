"""The candidates of a measurement, and their order.

A randomised complete block design: a batch of prompts is decoded in every way, one after the other and in random order,
before the next batch begins. A machine that slows down slows all ways, no way is always first, and an interrupted run
has measured every way equally often.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import ConfigError
from alphaloop.payoff.figures import VANILLA, Candidate

#: Draft lengths that are tried where none are named: short, usual, long.
DEFAULT_LENGTHS: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of prompts (their numbers), and every way to decode it, in the order of this turn."""

    block: int
    repeat: int
    prompts: tuple[int, ...]
    candidates: tuple[Candidate, ...]


def choose_drafters(configured: Collection[str], wanted: Sequence[str]) -> list[str]:
    """The drafters to load: those wanted, or all. Raises ConfigError."""
    if not configured:
        raise ConfigError(
            "no drafter is configured, so there is nothing to compare with",
            hint="add [models.drafters.lookup] to configs/models.toml",
        )
    if unknown := [name for name in wanted if name not in configured]:
        raise ConfigError(
            f"--drafter: expected one of {', '.join(sorted(configured))}, found {unknown[0]!r}",
            hint="drafters are named in configs/models.toml",
        )
    return list(dict.fromkeys(wanted)) or list(configured)


def choose_candidates(drafters: Sequence[DrafterState], lengths: Sequence[int]) -> list[Candidate]:
    """Each drafter at every length that it can draft; DEFAULT_LENGTHS, or its longest where it can draft none of them.

    Vanilla is not among them. Raises ConfigError for a length beyond every drafter.
    """
    longest = max((drafter.max_draft_tokens for drafter in drafters), default=0)
    if too_long := [k for k in lengths if k > longest]:
        raise ConfigError(
            f"--k: expected at most {longest}, found {too_long[0]}",
            hint="models.drafters.NAME.max_draft_tokens is the longest draft that a drafter makes",
        )
    found = []
    for drafter in drafters:
        own = [k for k in sorted(set(lengths or DEFAULT_LENGTHS)) if k == drafter.within(k)]
        found += [Candidate(drafter.name, k, drafter.revision) for k in own or [drafter.max_draft_tokens]]
    return found


def divide(num_prompts: int, batch: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Prompts in random order, in as few blocks as hold at most `batch` each, of sizes that differ by one at most."""
    order = rng.sample(range(num_prompts), num_prompts)
    num_blocks = -(-num_prompts // batch)
    ends = [num_prompts * (i + 1) // num_blocks for i in range(num_blocks)]
    return [tuple(order[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def turns(
    blocks: Sequence[tuple[int, ...]], candidates: Sequence[Candidate], num_repeats: int, rng: random.Random
) -> Iterator[Turn]:
    """Every block in every way, `num_repeats` times; all blocks once before any comes again."""
    every = [VANILLA, *candidates]
    for repeat in range(num_repeats):
        for block in rng.sample(range(len(blocks)), len(blocks)):
            yield Turn(block, repeat, blocks[block], tuple(rng.sample(every, len(every))))
