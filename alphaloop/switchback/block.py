"""One block of the experiment: treatment, control, treatment, with rounds left out at each switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from alphaloop.errors import ConfigError
from alphaloop.switchback.rounds import RoundFacts, Tally
from alphaloop.switchback.slices import Phase, Slice, Treatment

#: A stage that saw this many times its rounds is given up: nearly every round reads a prompt.
_MOST_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class SwitchbackDesign:
    """How long the parts of a block are, in rounds, and how much of the device's time control takes.

    The lengths were chosen by simulation (docs/concepts/switchback.md). Slices of 32 rounds give half as many blocks
    and intervals wider by up to a third. Slices of 8 gain up to a tenth, but double the rows and the harm of a switch
    whose effect outlasts the washout. Two rounds of washout are enough for a draft model that reads what it missed in
    one round; four cost a fifth of the blocks. Raises ConfigError.
    """

    control_share: float = 0.02  #: of speculating tasks' device time, with the rounds left out; 0: no trials
    num_control_rounds: int = 16
    num_washout_rounds: int = 2
    num_window_rounds: int = 16  #: of each of the two treatment windows

    def __post_init__(self) -> None:
        if min(self.num_control_rounds, self.num_window_rounds) < 1 or self.num_washout_rounds < 0:
            raise ConfigError(
                f"expected at least 1 control round, 1 window round and 0 washout rounds, found "
                f"{self.num_control_rounds}, {self.num_window_rounds}, {self.num_washout_rounds}"
            )
        if not 0 <= self.control_share <= self.largest_share:
            raise ConfigError(
                f"expected a control share of 0 to {self.largest_share:.3f}, found {self.control_share}",
                hint="blocks of these lengths, one after the other, have no larger share of control rounds",
            )

    @property
    def num_charged_rounds(self) -> int:
        """Rounds of a block that count as spent on control."""
        return self.num_control_rounds + 2 * self.num_washout_rounds

    @property
    def largest_share(self) -> float:
        """The share of blocks that follow each other without a round between."""
        return self.num_charged_rounds / (self.num_charged_rounds + 2 * self.num_window_rounds)


class Stage(IntEnum):
    """Where a block stands, in order."""

    BEFORE = 0
    LEAVING = 1  #: washout: vanilla already, not counted
    CONTROL = 2
    RETURNING = 3  #: washout: treatment again, not counted
    AFTER = 4
    ENDED = 5


_COUNTED = {Stage.BEFORE: Phase.BEFORE, Stage.CONTROL: Phase.CONTROL, Stage.AFTER: Phase.AFTER}


class Block:
    """A block that is running: all tasks that speculate switch together, so the control slice has nothing but vanilla.

    A task may leave before the block ends. The slices of those that stay name the k with which the block began.
    """

    def __init__(
        self, treatments: Mapping[str, Treatment], new_id: Callable[[], str], design: SwitchbackDesign
    ) -> None:
        self.stage = Stage.BEFORE
        self._parts = {task: _Part(new_id(), task, treatment) for task, treatment in treatments.items()}
        self._lengths = {
            Stage.BEFORE: design.num_window_rounds,
            Stage.LEAVING: design.num_washout_rounds,
            Stage.CONTROL: design.num_control_rounds,
            Stage.RETURNING: design.num_washout_rounds,
            Stage.AFTER: design.num_window_rounds,
        }
        # Of this stage.
        self._num_rounds = self._num_counted = 0

    @property
    def treatments(self) -> Mapping[str, Treatment]:
        """Of the tasks that are still in the block."""
        return {task: part.treatment for task, part in self._parts.items() if part.is_here}

    @property
    def ids(self) -> Mapping[str, str]:
        """The id of each task's slices."""
        return {task: part.block_id for task, part in self._parts.items()}

    @property
    def is_vanilla(self) -> bool:
        """Whether the next round decodes vanilla."""
        return self.stage in (Stage.LEAVING, Stage.CONTROL)

    @property
    def is_charged(self) -> bool:
        """Whether the next round counts as spent on control."""
        return Stage.LEAVING <= self.stage <= Stage.RETURNING

    def leave(self, task: str) -> None:
        """The task has no sequence left, or another drafter. The block ends when all have left."""
        self._parts[task].is_here = False
        if not self.treatments:
            self.stage = Stage.ENDED

    def observe(self, facts: RoundFacts) -> None:
        """The round that ran. A task without sequences in it leaves the block."""
        for task in self.treatments:
            if task not in facts.tasks or not facts.tasks[task].num_sequences:
                self.leave(task)
        if self.stage is Stage.ENDED:
            return
        self._num_rounds += 1
        phase = _COUNTED.get(self.stage)
        num_done, length = self._num_rounds, self._lengths[self.stage]
        if phase is not None:
            for task in self.treatments:
                self._parts[task].add(phase, facts)
            self._num_counted += not facts.has_prompt
            num_done = self._num_counted
            if num_done < length and self._num_rounds >= _MOST_PROMPTS * length:
                self.stage = Stage.ENDED
        while self.stage < Stage.ENDED and num_done >= self._lengths[self.stage]:
            self.stage = Stage(self.stage + 1)
            self._num_rounds = self._num_counted = num_done = 0

    def slices(self) -> tuple[Slice, ...]:
        """What was counted: of a task nothing unless its control slice is complete."""
        complete = self._lengths[Stage.CONTROL]
        return tuple(one for part in self._parts.values() for one in part.slices(complete))


@dataclass(slots=True)
class _Part:
    """A task's share in a block."""

    block_id: str
    task: str
    treatment: Treatment
    is_here: bool = True
    tallies: dict[Phase, Tally] = field(default_factory=dict)

    def add(self, phase: Phase, facts: RoundFacts) -> None:
        self.tallies.setdefault(phase, Tally(facts.started_at)).add(facts, facts.tasks[self.task])

    def slices(self, num_control_rounds: int) -> tuple[Slice, ...]:
        control = self.tallies.get(Phase.CONTROL)
        if control is None or control.num_rounds < num_control_rounds:
            return ()
        return tuple(
            tally.slice(self.block_id, self.task, phase, self.treatment)
            for phase, tally in self.tallies.items()
            if tally.num_rounds
        )
