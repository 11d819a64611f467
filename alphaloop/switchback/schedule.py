"""Which arm a task's running sequences are in, round by round.

Every task that speculates has a ledger in device seconds. A round in treatment earns `share / (1 - share)` of its time;
a round spent on control takes its time. A block begins once the balance reaches a random multiple, 0.5 to 1.5, of what
a block is expected to take. The balance stays bounded, so the share of control tends to `control_share` whatever a
round takes, and no periodic load can follow the blocks.

One block runs at a time, because a round is shared: two tasks that switch at once would disturb each other's times.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, TypeAlias

from alphaloop.switchback.block import Block, Stage, SwitchbackDesign
from alphaloop.switchback.rounds import Census, RoundFacts
from alphaloop.switchback.slices import Slice, Treatment

#: What a task's sequences do in a round: speculate like this, or None: vanilla, the control arm.
Arm: TypeAlias = Treatment | None

#: Expected costs of a block that a task may save up while blocks of other tasks run.
_MOST_SAVED: Final = 3.0
#: How far the time of a round moves towards the last one seen.
_ROUND_WEIGHT: Final = 0.05


class SwitchbackSchedule:
    """Ask `next_round` before each engine step, tell `observe` after it. Not thread-safe: the decoding thread owns it.

    A task's treatment may change from round to round, except in a block: the block keeps the treatment it began with,
    and ends early if the drafter changes or the task has no sequence left.
    """

    def __init__(self, design: SwitchbackDesign, rng: random.Random) -> None:
        self._design, self._rng = design, rng
        self._ledgers: dict[str, _Ledger] = {}
        self._arms: dict[str, Arm] = {}
        self._block: Block | None = None
        self._ended: list[Slice] = []

    @property
    def is_charged(self) -> bool:
        """Whether a task spends the round that was asked for last on control, washouts included."""
        return self._block is not None and self._block.is_charged

    def next_round(self, running: Mapping[str, Treatment]) -> Mapping[str, Arm]:
        """The arm of every task of `running`: those that have sequences and would speculate in this round."""
        block = self._block
        if block is not None:
            wanted = running.get(block.task)
            if wanted is None or wanted.drafter != block.treatment.drafter:
                self._end_block()
        if self._block is None and self._design.control_share:
            self._block = self._due(running)
        self._arms = dict(running)
        if self._block is not None:
            self._arms[self._block.task] = None if self._block.is_vanilla else self._block.treatment
        return self._arms

    def observe(self, facts: RoundFacts) -> tuple[Slice, ...]:
        """The step that `next_round` spoke of. Returns the slices that ended with it, to be stored."""
        block = self._block
        is_disturbed = self.is_charged
        for task, arm in self._arms.items():
            own = facts.tasks.get(task)
            if own is None or not own.num_sequences:
                continue
            ledger = self._ledger(task)
            is_on_trial = block is not None and block.task == task
            ledger.charge(facts.device_s(task), is_control=is_on_trial and is_disturbed)
            if arm is not None and not is_on_trial and not is_disturbed:
                ledger.census.add(facts, own, arm)
        if block is not None:
            block.observe(facts)
            if block.stage is Stage.ENDED:
                self._end_block()
        ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> tuple[Slice, ...]:
        """End the block that runs and hand over all that was counted: when the worker drains."""
        self._end_block()
        for task, ledger in self._ledgers.items():
            self._ended += ledger.census.take(self._new_id(), task)
        ended, self._ended = tuple(self._ended), []
        return ended

    def _due(self, running: Mapping[str, Treatment]) -> Block | None:
        """A new block for the task that is furthest past its moment, if one is."""
        overdue, task = max(((self._ledger(task).overdue, task) for task in running), default=(-1.0, ""))
        if overdue < 0:
            return None
        block = Block(self._new_id(), task, running[task], self._design)
        ledger = self._ledger(task)
        ledger.draw()
        self._ended += ledger.census.take(block.block_id, task)
        return block

    def _end_block(self) -> None:
        if self._block is not None:
            self._ended += self._block.slices()
            self._block = None

    def _ledger(self, task: str) -> _Ledger:
        ledger = self._ledgers.get(task)
        if ledger is None:
            ledger = self._ledgers[task] = _Ledger(self._design, self._rng)
        return ledger

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


class _Ledger:
    """What a task accrued for control and has not spent, in device seconds, and its rounds outside blocks."""

    def __init__(self, design: SwitchbackDesign, rng: random.Random) -> None:
        share = design.control_share
        self._earning = share / (1 - share)
        self._num_charged_rounds = design.num_charged_rounds
        self._rng = rng
        self._round_s = 0.0  # the task's share of a round, smoothed; 0 before the first
        self._balance_s = 0.0
        self._due_s = 0.0
        self.census = Census()

    def draw(self) -> None:
        """When the next block begins: in seconds, so that a change of load or host does not call a block."""
        self._due_s = self._rng.uniform(0.5, 1.5) * self._num_charged_rounds * self._round_s

    def charge(self, device_s: float, *, is_control: bool) -> None:
        """A round of the task."""
        if is_control:
            self._balance_s -= device_s
            return
        if not self._round_s:
            self._round_s = device_s
            self.draw()
        self._round_s += _ROUND_WEIGHT * (device_s - self._round_s)
        most_s = max(self._due_s, _MOST_SAVED * self._num_charged_rounds * self._round_s)
        self._balance_s = min(self._balance_s + self._earning * device_s, most_s)

    @property
    def overdue(self) -> float:
        """By how many rounds' times the balance is past the moment drawn; negative before that."""
        return (self._balance_s - self._due_s) / self._round_s if self._round_s else -1.0
