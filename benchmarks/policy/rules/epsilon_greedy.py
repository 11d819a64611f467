"""ε-greedy over (drafter, k), by the milliseconds a token that each took: the bandit that needs no model at all."""

from __future__ import annotations

import random
from typing import Final

from benchmarks.policy.play import Batch, Choice, Decoded, Why

#: Share of batches decoded at random: the best of five. Mean gross goodput over the oracle's, twelve scenarios, seeds
#: 501 to 508: 1 % .844, 2 % .882, 5 % .921, 10 % .927, 20 % .917.
EPSILON: Final = 0.1
#: Weight of the newest batch, so that a change is followed: about the last 20 of an arm count.
RECENCY: Final = 0.1


class EpsilonGreedy:
    """Arms by task and batch size, each tried for the first time by chance. Its means live in the process."""

    def __init__(self, actions: tuple[tuple[str | None, int], ...], seed: int) -> None:
        self._actions = actions
        self._rng = random.Random(seed)
        self._means: dict[tuple[str, int], dict[tuple[str | None, int], float]] = {}

    def choose(self, batch: Batch) -> Choice:
        """The fastest arm so far, or any."""
        if self._rng.random() < EPSILON:
            return Choice(*self._rng.choice(self._actions), Why.EXPLORING)
        means = self._means.get((batch.cell.task, batch.num_running))
        return Choice(*min(means, key=means.__getitem__)) if means else Choice()

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Milliseconds a token."""
        means = self._means.setdefault((batch.cell.task, batch.num_running), {})
        arm = (choice.drafter, choice.num_draft_tokens)
        took = decoded.ms / sum(decoded.num_tokens)
        means[arm] = means[arm] + RECENCY * (took - means[arm]) if arm in means else took

    def restart(self) -> None:
        """All is forgotten."""
        self._means = {}
