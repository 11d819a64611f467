"""One block of the experiment: treatment, control, treatment, with rounds left out at each switch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from alphaloop.errors import ConfigError
from alphaloop.switchback.rounds import RoundFacts, Tally
from alphaloop.switchback.slices import Phase, Slice, Treatment

#: A stage that saw this many times its rounds is given up: nearly every round reads a prompt.
_MOST_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class SwitchbackDesign:
    """How long the parts of a block are, in rounds, and how much of a task's device time control takes.

    The lengths were chosen by simulation (docs/concepts/switchback.md). Slices of 32 rounds give half as many blocks
    and intervals wider by up to a third. Slices of 8 gain up to a tenth, but double the rows and the harm of a switch
    whose effect outlasts the washout. Two rounds of washout are enough for a draft model that reads what it missed in
    one round; four cost a fifth of the blocks. Raises ConfigError.
    """

    control_share: float = 0.02  #: of the task's device time, with the rounds left out at both switches; 0: no trials
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
    """A block that is running. The treatment is the same from its first round to its last."""

    def __init__(self, block_id: str, task: str, treatment: Treatment, design: SwitchbackDesign) -> None:
        self.block_id, self.task, self.treatment = block_id, task, treatment
        self.stage = Stage.BEFORE
        self._lengths = {
            Stage.BEFORE: design.num_window_rounds,
            Stage.LEAVING: design.num_washout_rounds,
            Stage.CONTROL: design.num_control_rounds,
            Stage.RETURNING: design.num_washout_rounds,
            Stage.AFTER: design.num_window_rounds,
        }
        self._tallies: dict[Phase, Tally] = {}
        self._num_rounds = 0  # of this stage, those with a prompt included

    @property
    def is_vanilla(self) -> bool:
        """Whether the next round decodes the task vanilla."""
        return self.stage in (Stage.LEAVING, Stage.CONTROL)

    @property
    def is_charged(self) -> bool:
        """Whether the next round counts as spent on control."""
        return Stage.LEAVING <= self.stage <= Stage.RETURNING

    def observe(self, facts: RoundFacts) -> None:
        """The round that ran. A round without the task's sequences ends the block."""
        own = facts.tasks.get(self.task)
        if own is None or not own.num_sequences:
            self.stage = Stage.ENDED
            return
        self._num_rounds += 1
        phase = _COUNTED.get(self.stage)
        num_done = self._num_rounds
        if phase is not None:
            tally = self._tallies.setdefault(phase, Tally(facts.started_at))
            tally.add(facts, own)
            num_done = tally.num_rounds
            if num_done < self._lengths[self.stage] and self._num_rounds >= _MOST_PROMPTS * self._lengths[self.stage]:
                self.stage = Stage.ENDED
        self._advance(num_done)

    def _advance(self, num_done: int) -> None:
        while self.stage < Stage.ENDED and num_done >= self._lengths[self.stage]:
            self.stage = Stage(self.stage + 1)
            self._num_rounds = num_done = 0

    def slices(self) -> tuple[Slice, ...]:
        """What was counted: nothing unless the control slice is complete."""
        control = self._tallies.get(Phase.CONTROL)
        if control is None or control.num_rounds < self._lengths[Stage.CONTROL]:
            return ()
        return tuple(
            tally.slice(self.block_id, self.task, phase, self.treatment)
            for phase, tally in self._tallies.items()
            if tally.num_rounds
        )
