"""Which arm the running sequences are in, round by round.

There is a ledger in device seconds of the tasks that speculate. A round in treatment earns `share / (1 - share)` of its
time; a round spent on control takes its time. A block begins once the balance reaches a random multiple, 0.5 to 1.5, of
what a block is expected to take. The balance stays bounded, so the share of control tends to `control_share` whatever a
round takes, and no periodic load can follow the blocks.

All tasks that speculate switch together, because they share their rounds. If some went on drafting, a control slice
would take longer the more of its sequences are theirs, and that number differs from slice to slice.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, TypeAlias

from alphaloop.switchback.block import Block, Stage, SwitchbackDesign
from alphaloop.switchback.rounds import Census, RoundFacts
from alphaloop.switchback.slices import Slice, Treatment

#: What a task's sequences do in a round: speculate like this, or None: vanilla, the control arm.
Arm: TypeAlias = Treatment | None

#: How far the time of a round moves towards the last one seen.
_ROUND_WEIGHT: Final = 0.05
#: Rounds by whose mean time the first block is planned. The first of them read prompts, so one alone is far too long.
_NUM_FIRST_ROUNDS: Final = 16


class SwitchbackSchedule:
    """Ask `next_round` before each engine step, tell `observe` after it. Not thread-safe: the decoding thread owns it.

    The treatment is what the policy wants in each round: k may change inside a block, as it does outside. A task leaves
    the block if its drafter changes or it has no sequence left. One that comes while a block runs switches with the
    others and is not counted.
    """

    def __init__(self, design: SwitchbackDesign, rng: random.Random) -> None:
        self._design, self._rng = design, rng
        self._ledger = _Ledger(design, rng)
        self._censuses: dict[str, Census] = defaultdict(Census)
        self._arms: dict[str, Arm] = {}
        self._block: Block | None = None
        self._ended: list[Slice] = []

    @property
    def is_charged(self) -> bool:
        """Whether the round that was asked for last is spent on control, washouts included."""
        return self._block is not None and self._block.is_charged

    def next_round(self, running: Mapping[str, Treatment]) -> Mapping[str, Arm]:
        """The arm of every task of `running`: those that have sequences and would speculate in this round."""
        block = self._block
        if block is not None:
            for task, treatment in block.treatments.items():
                wanted = running.get(task)
                if wanted is None or wanted.drafter != treatment.drafter:
                    block.leave(task)
            if block.stage is Stage.ENDED:
                self._end_block()
        if self._block is None and self._design.control_share and running and self._ledger.is_due:
            self._begin_block(running)
        is_vanilla = self._block is not None and self._block.is_vanilla
        self._arms = dict.fromkeys(running) if is_vanilla else dict(running)
        return self._arms

    def observe(self, facts: RoundFacts) -> tuple[Slice, ...]:
        """The step that `next_round` spoke of. Returns the slices that ended with it, to be stored."""
        block, is_disturbed = self._block, self.is_charged
        self._ledger.charge(sum(facts.device_s(task) for task in self._arms), is_control=is_disturbed)
        on_trial = block.treatments if block is not None else {}
        for task, arm in self._arms.items():
            own = facts.tasks.get(task)
            if own is not None and own.num_sequences and arm is not None and task not in on_trial and not is_disturbed:
                self._censuses[task].add(facts, own, arm)
        if block is not None:
            block.observe(facts)
            if block.stage is Stage.ENDED:
                self._end_block()
        ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> tuple[Slice, ...]:
        """End the block that runs and hand over all that was counted: when the worker drains."""
        self._end_block()
        for task, census in self._censuses.items():
            self._ended += census.take(self._new_id(), task)
        ended, self._ended = tuple(self._ended), []
        return ended

    def _begin_block(self, running: Mapping[str, Treatment]) -> None:
        self._block = Block(running, self._new_id, self._design)
        self._ledger.draw()
        for task, block_id in self._block.ids.items():
            self._ended += self._censuses[task].take(block_id, task)

    def _end_block(self) -> None:
        if self._block is not None:
            self._ended += self._block.slices()
            self._block = None

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


class _Ledger:
    """What was accrued for control and is not spent, in device seconds."""

    def __init__(self, design: SwitchbackDesign, rng: random.Random) -> None:
        share = design.control_share
        self._earning = share / (1 - share)
        self._num_charged_rounds = design.num_charged_rounds
        self._rng = rng
        self._num_rounds = 0  # of treatment
        self._round_s = 0.0  # the time of a round of treatment, smoothed
        self._balance_s = 0.0
        self._due_s = 0.0

    def draw(self) -> None:
        """When the next block begins: in seconds, so that a change of load or host does not call a block."""
        self._due_s = self._rng.uniform(0.5, 1.5) * self._num_charged_rounds * self._round_s

    def charge(self, device_s: float, *, is_control: bool) -> None:
        """A round."""
        if not device_s:
            return
        if is_control:
            self._balance_s -= device_s
            return
        self._num_rounds += 1
        self._round_s += max(_ROUND_WEIGHT, 1 / self._num_rounds) * (device_s - self._round_s)
        self._balance_s += self._earning * device_s
        if self._num_rounds == _NUM_FIRST_ROUNDS:
            self.draw()

    @property
    def is_due(self) -> bool:
        """Whether the balance has reached the moment drawn."""
        return self._num_rounds >= _NUM_FIRST_ROUNDS and self._balance_s >= self._due_s
