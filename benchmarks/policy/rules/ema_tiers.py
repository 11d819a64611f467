"""Draft lengths in tiers by a moving average of accepted tokens, after SGLang's `--speculative-adaptive`.

Written for this comparison from what its documentation and source say: a slot for each range of batch sizes with its
own candidates, the average of a step's accepted tokens a sequence with weight .2, ten steps of warm-up, a verdict every
five, down a tier at its length - .5 less a hysteresis, up beyond the tier's length - .5; no drafting at tier 0, and
after five such steps the next tier again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.policy.play import Batch
from benchmarks.policy.rounds import Round
from benchmarks.policy.stream import Drafts

SLOTS: Final = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
DOWN_HYSTERESIS: Final = {1: -0.25, 8: 0.0, 32: 0.0, 64: 0.0}
NEWEST: Final = 0.2
WARM_UP_STEPS: Final = 10
STEPS_A_VERDICT: Final = 5
FIRST_TIER: Final = 3


class EmaTiers:
    """One drafter, one length for the whole step, whatever the tasks; all in the process."""

    def __init__(self, drafter: str, most: int) -> None:
        self.drafter = drafter
        self._most = most
        self.restart()

    def restart(self) -> None:
        """All is forgotten."""
        self._slots = {
            size: _Slot(tuple(t for t in tiers if t <= self._most), DOWN_HYSTERESIS[size])
            for size, tiers in SLOTS.items()
        }

    def begin(self, batch: Batch, drafts: Drafts, index: int) -> None:
        """The slot of this load; otherwise it looks at steps, not at jobs."""
        self.at_load(batch.num_jobs)

    def at_load(self, num_running: int) -> None:
        """So many sequences share the next step."""
        self._slot = self._slots[min(SLOTS, key=lambda size: abs(size - num_running))]

    def lengths(self, jobs: Sequence[int], numbers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The tier of the slot nearest to the load."""
        steps = self._slot.steps
        return steps, [steps] * len(jobs)

    def follow(self, done: Round) -> None:
        """The step's mean of accepted tokens."""
        self.accepted(sum(done.num_accepted) / len(done.jobs))

    def accepted(self, mean: float) -> None:
        """The step's mean of accepted tokens a sequence."""
        self._slot.update(mean)


class _Slot:
    def __init__(self, tiers: tuple[int, ...], down_hysteresis: float) -> None:
        self._tiers, self._down = tiers, down_hysteresis
        self._at = tiers.index(FIRST_TIER) if FIRST_TIER in tiers else len(tiers) // 2
        self._mean = self.steps - 1.0
        self._num_steps = 0

    @property
    def steps(self) -> int:
        return self._tiers[self._at]

    def update(self, accepted: float) -> None:
        if self.steps:
            self._mean += NEWEST * (accepted - self._mean)
        self._num_steps += 1
        if self._num_steps > WARM_UP_STEPS and (self._num_steps - WARM_UP_STEPS) % STEPS_A_VERDICT == 0:
            self._judge()

    def _judge(self) -> None:
        last = len(self._tiers) - 1
        if self.steps == 0:
            self._at = min(1, last)
            if self._mean < 0:
                self._mean = self.steps - 1.0
            return
        before = self._at
        while self._at > 0 and self._mean <= max(self._tiers[self._at - 1] - 0.5, 0.5) + self._down:
            self._at -= 1
        if self._at == before:
            while self._at < last and self._mean > self.steps - 0.5:
                self._at += 1
