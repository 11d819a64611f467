"""What the switchback experiment stores: runs of engine rounds in which a task was in one arm, as counts.

The unit of time is the sequence-second: the wall time of a round, once for each sequence of the task in that round.
Tokens over sequence-seconds is then the speed at which one running sequence of the task gets its text. Sequences of
other tasks in the same round slow both arms alike and do not enter.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

#: Mean tokens of context up to which slices share a stratum, in steps of four.
_CONTEXT_LIMITS: Final = (256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Treatment:
    """How a task's sequences speculate: the treatment arm. The control arm is vanilla decoding."""

    drafter: str
    num_draft_tokens: int


class Phase(StrEnum):
    """Where in the experiment a slice lies. All but `CONTROL` are slices of the treatment arm."""

    BETWEEN = "between"  #: treatment, outside a block
    BEFORE = "before"  #: treatment, the block's window before its control slice
    CONTROL = "control"  #: vanilla
    AFTER = "after"  #: treatment, the block's window after its control slice


class Stratum(NamedTuple):
    """Rounds of about the same cost: what is compared is compared within a stratum."""

    running: int  #: power of two: floor(log2(sequences in the round))
    context: int  #: 0 up to 256 tokens of context, 1 up to 1024, 2 up to 4096, 3 beyond

    @classmethod
    def of(cls, num_running: float, context_tokens: float) -> Stratum:
        """The stratum of a round, or of a slice with these means."""
        return cls(max(round(num_running), 1).bit_length() - 1, bisect_left(_CONTEXT_LIMITS, context_tokens))


@dataclass(frozen=True, slots=True)
class Slice:
    """Rounds of one task in one arm, added up.

    A round is *counted* unless a prompt was read in it. Rounds with a prompt are kept apart, in the last four fields:
    a prompt's time belongs to the texts that will follow, which is not what a slice of a few rounds compares. A slice
    has at least one round of either kind.
    """

    block_id: str  #: the three slices of a block share it, and the slices since the block before
    task: str
    phase: Phase
    treatment: Treatment  #: of the block; a control slice names the treatment it is compared with
    started_at: datetime
    num_rounds: int
    num_sequence_rounds: int  #: Σ over rounds of the task's sequences
    num_tokens: int  #: that these sequences put out
    num_proposed: int  #: draft tokens that the target read for these sequences
    sequence_s: float  #: Σ over rounds of wall seconds × the task's sequences
    sum_running: int  #: Σ over all rounds, those with a prompt too, of the sequences of all tasks
    sum_context: float  #: Σ over all rounds of the mean tokens of context of all sequences
    num_prompt_rounds: int = 0
    num_prompt_sequence_rounds: int = 0
    num_prompt_tokens: int = 0  #: put out by the task's sequences in rounds with a prompt
    prompt_sequence_s: float = 0.0
    # Of all rounds, those with a prompt too, over the sequences whose decision expected something of their drafter. All
    # are Σ seconds × sequences × a figure of the expectation (expectation.py), so that sums of slices give its means.
    expected_sequence_s: float = 0.0  #: × 1
    expected_vanilla_s: float = 0.0  #: × speed-up: what vanilla rounds were expected to take
    expected_low_s: float = 0.0
    expected_high_s: float = 0.0
    uncorrected_vanilla_s: float = 0.0
    model_sd_s: float = 0.0
    sum_elsewhere: float = 0.0  #: of requests: Σ over all rounds of those at other endpoints (requests.py)

    @property
    def mean_running(self) -> float:
        """Sequences of all tasks a round."""
        return self.sum_running / (self.num_rounds + self.num_prompt_rounds)

    @property
    def mean_elsewhere(self) -> float:
        """Requests at other endpoints a round; 0 of a device."""
        return self.sum_elsewhere / (self.num_rounds + self.num_prompt_rounds)

    @property
    def mean_context(self) -> float:
        """Tokens of context a sequence."""
        return self.sum_context / (self.num_rounds + self.num_prompt_rounds)

    @property
    def stratum(self) -> Stratum:
        """By the slice's means."""
        return Stratum.of(self.mean_running, self.mean_context)

    @property
    def round_s(self) -> float:
        """Seconds a round, as the task's sequences saw it. Needs a counted round of the task."""
        return self.sequence_s / self.num_sequence_rounds


#: The fields of a slice that add up.
SUMS: Final = tuple(
    field.name for field in fields(Slice) if field.name not in ("block_id", "task", "phase", "treatment", "started_at")
)
