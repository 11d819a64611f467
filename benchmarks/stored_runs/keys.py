"""The 1,000 keys of the stored runs, and the counts that jobs of each have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from alphaloop.acceptance import AcceptanceCounts

#: The documents' queries ask for `code`.
TASKS: Final = (
    "code", "chat", "sql", "summarization", "translation", "extraction", "rag", "math", "legal", "support",
    "classification", "rewriting", "planning", "tests", "review", "search", "titles", "mail", "reports", "tools",
)  # fmt: skip
#: Each with its sampling settings and its prompt lengths.
SEGMENTS: Final = (
    ("", "greedy", "<=256"),
    ("pro", "t<=1.0", "<=1024"),
    ("free", "t<=1.0", "<=256"),
    ("batch", "greedy", "<=4096"),
    ("internal", "greedy", "<=1024"),
)
#: Drafter, k, and α of its first position in the first task; vanilla first.
WAYS: Final = (
    ("", 0, 0.0),
    ("lookup", 4, 0.45), ("lookup", 8, 0.44), ("lookup", 2, 0.47),
    ("small", 3, 0.70), ("small", 5, 0.69), ("small", 1, 0.72),
    ("eagle", 4, 0.80), ("eagle", 6, 0.79), ("eagle", 2, 0.81),
)  # fmt: skip
DRAFTERS: Final = ("lookup", "small", "eagle")
#: Where a vanilla job also counted what look-up would have drafted: this way's counts.
SHADOW_WAY: Final = 1
#: Different counts that jobs of one key have; a power of two.
NUM_VARIANTS: Final = 16
MOST_POSITIONS: Final = max(k for _, k, _ in WAYS)


@dataclass(frozen=True, slots=True)
class Key:
    """One row of bench.keys; `upper` is where its share of the jobs ends, in (0, 1]."""

    key: int
    task: str
    segment: str
    sampling_bucket: str
    prompt_bucket: str
    drafter: str
    num_draft_tokens: int
    alpha: float
    upper: float

    @property
    def mode(self) -> str:
        """vanilla or speculative."""
        return "speculative" if self.drafter else "vanilla"


def all_keys() -> list[Key]:
    """Every task in every segment in every way. Shares fall with the rank of each of the three (Zipf)."""
    places = [(t, s, w) for t in range(len(TASKS)) for s in range(len(SEGMENTS)) for w in range(len(WAYS))]
    uppers = list(accumulate(1 / ((1 + t) * (1 + s) * (1 + w)) for t, s, w in places))
    found = []
    for number, (t, s, w) in enumerate(places):
        segment, sampling, prompt = SEGMENTS[s]
        drafter, k, alpha = WAYS[w]
        upper = uppers[number] / uppers[-1]
        found.append(Key(number, TASKS[t], segment, sampling, prompt, drafter, k, alpha * (1 - t / 100), upper))
    return found


def variants(key: Key) -> Iterator[AcceptanceCounts]:
    """The counts of jobs of a key: longer and shorter ones, of higher and of lower acceptance."""
    for variant in range(NUM_VARIANTS):
        rounds, alpha = 12 + 5 * variant, key.alpha + 0.02 * (variant % 5 - 2)
        # Look-up offers nothing in a third of its rounds. The prefill proposes nothing either.
        drafted = (rounds - 1) * (2 if key.drafter == "lookup" else 3) // 3 if key.drafter else 0
        left = [math.floor(drafted * alpha**i) for i in range(key.num_draft_tokens + 1)]
        yield AcceptanceCounts(
            rounds=rounds,
            num_empty_rounds=rounds - drafted,
            proposed=(drafted,) * key.num_draft_tokens,
            trials=tuple(left[:-1]),
            accepts=tuple(left[1:]),
        )
