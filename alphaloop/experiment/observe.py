"""What the experiment observes of rounds and requests, and what it stores: slices, sums over rounds of one arm.

The unit of time is the sequence-second: the wall time of a round, once for each sequence of the task in that round.
Tokens over sequence-seconds is then the speed at which one running sequence of the task gets its text. Sequences of
other tasks in the same round slow both arms alike and do not enter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

#: Mean tokens of context up to which slices share a stratum, in steps of four.
_CONTEXT_LIMITS: Final = (256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Treatment:
    """How a task's sequences speculate: the treatment arm, or the control arm where that has a rival drafter."""

    drafter: str
    num_draft_tokens: int


class TrialGroup(NamedTuple):
    """Requests that are compared with each other: of one subject, decided for the same drafter and k."""

    subject: str
    treatment: Treatment


class Expected(NamedTuple):
    """The speed-up over vanilla that a decision expects of its setting."""

    speedup: float  #: as it was shown and decided on
    low: float  #: lower 95 % bound
    high: float
    uncorrected: float  #: before earlier measurements corrected it
    model_sd: float  #: standard deviation of ln(uncorrected), from acceptance and costs


def mean_expected(expected: Iterable[Expected]) -> Expected | None:
    """The mean over sequences that run together; None without any."""
    columns = list(zip(*expected, strict=True))
    return Expected(*(sum(values) / len(values) for values in columns)) if columns else None


@dataclass(frozen=True, slots=True)
class TaskRound:
    """What one task had in one round: of its sequences that are on trial, those that decoded.

    Sequences that only read their prompt, and sequences whose mode a job or an operator fixed, are left out.
    """

    num_sequences: int
    num_tokens: int
    num_proposed: int = 0  #: draft tokens that the target read for them
    expected: Expected | None = None  #: mean of their decisions


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One engine step, after it ran."""

    started_at: datetime
    wall_s: float
    num_running: int  #: sequences of all tasks
    mean_context_tokens: float  #: over all sequences
    has_prompt: bool  #: a piece of a prompt was read in this step
    tasks: Mapping[str, TaskRound]

    @property
    def stratum(self) -> Stratum:
        """The stratum of this round alone."""
        return Stratum.of(self.num_running, self.mean_context_tokens)

    def device_s(self, task: str) -> float:
        """The task's share of the step, by sequences; 0 where it has none."""
        own = self.tasks.get(task)
        return self.wall_s * own.num_sequences / max(self.num_running, own.num_sequences, 1) if own else 0.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A request, after it ended. Its rounds are passes of the target for it, whatever else shared them."""

    started_at: datetime
    num_rounds: int  #: after the pass that read the prompt; 0 where the text has one token
    num_tokens: int  #: that these put out
    num_proposed: int  #: draft tokens that the target read in them
    decode_s: float  #: that these took
    prompt_s: float | None  #: to the first token, without waiting; None where `decode_s` and the counts include it
    num_beside: float  #: requests in flight at its endpoint meanwhile, whoever sent them, the mean, itself included
    num_elsewhere: float  #: the same at the other endpoints
    mean_context_tokens: float
    expected: Expected | None = None  #: of its decision

    @property
    def stratum(self) -> Stratum:
        """The stratum of this request alone."""
        return Stratum.of(self.num_beside, self.mean_context_tokens)


class Phase(StrEnum):
    """Where in the experiment a slice lies. All but `CONTROL` are slices of the treatment arm."""

    BETWEEN = "between"  #: treatment, outside a block
    BEFORE = "before"  #: treatment, the block's window before its control slice
    CONTROL = "control"  #: vanilla, or with the rival drafter that `Slice.against` names
    AFTER = "after"  #: treatment, the block's window after its control slice


class Stratum(NamedTuple):
    """Rounds of about the same cost: what is compared is compared within a stratum."""

    running: int  #: power of two: floor(log2(sequences in the round))
    context: int  #: 0 up to 256 tokens of context, 1 up to 1024, 2 up to 4096, 3 beyond

    @classmethod
    def of(cls, num_running: float, context_tokens: float) -> Stratum:
        """The stratum of a round, or of a slice with these means."""
        return cls(max(round(num_running), 1).bit_length() - 1, bisect_left(_CONTEXT_LIMITS, context_tokens))


@dataclass(slots=True)
class Slice:
    """Rounds of one task in one arm, added up: of a device, or of requests that servers decoded.

    A round is *counted* unless a prompt was read in it. Rounds with a prompt are kept apart, in the last four fields:
    a prompt's time belongs to the texts that will follow, which is not what a slice of a few rounds compares. A slice
    has at least one round of either kind.
    """

    block_id: str  #: the three slices of a block share it, and the slices since the block before
    task: str
    phase: Phase
    treatment: Treatment  #: of the block; a control slice names the treatment it is compared with
    started_at: datetime
    num_rounds: int = 0
    num_sequence_rounds: int = 0  #: Σ over rounds of the task's sequences
    num_tokens: int = 0  #: that these sequences put out
    num_proposed: int = 0  #: draft tokens that the target read for these sequences
    sequence_s: float = 0.0  #: Σ over rounds of wall seconds × the task's sequences
    sum_running: int = 0  #: Σ over all rounds, those with a prompt too, of the sequences of all tasks
    sum_context: float = 0.0  #: Σ over all rounds of the mean tokens of context of all sequences
    num_prompt_rounds: int = 0
    num_prompt_sequence_rounds: int = 0
    num_prompt_tokens: int = 0  #: put out by the task's sequences in rounds with a prompt
    prompt_sequence_s: float = 0.0
    # Sums over all rounds, those with a prompt too, of sequences whose decision expected something of their drafter:
    # Σ seconds × sequences × a figure of the expectation (`Expected`), so that sums of slices give its means.
    expected_sequence_s: float = 0.0  #: × 1
    expected_vanilla_s: float = 0.0  #: × speed-up: what vanilla rounds were expected to take
    expected_low_s: float = 0.0
    expected_high_s: float = 0.0
    uncorrected_vanilla_s: float = 0.0
    model_sd_s: float = 0.0
    sum_elsewhere: float = 0.0  #: of requests: Σ over all rounds of those at other endpoints
    against: str = ""  #: the drafter of the block's control slice; empty: it decodes vanilla, or there is no block

    def add(self, facts: RoundFacts, own: TaskRound) -> None:
        """One more round."""
        self.sum_running += facts.num_running
        self.sum_context += facts.mean_context_tokens
        if own.expected is not None:
            self._expect(own.expected, facts.wall_s * own.num_sequences)
        if facts.has_prompt:
            self.num_prompt_rounds += 1
            self.num_prompt_sequence_rounds += own.num_sequences
            self.num_prompt_tokens += own.num_tokens
            self.prompt_sequence_s += facts.wall_s * own.num_sequences
            return
        self.num_rounds += 1
        self.num_sequence_rounds += own.num_sequences
        self.num_tokens += own.num_tokens
        self.num_proposed += own.num_proposed
        self.sequence_s += facts.wall_s * own.num_sequences

    def add_request(self, facts: RequestFacts) -> None:
        """One more request that a server decoded to its end."""
        num_rounds = facts.num_rounds + (facts.prompt_s is not None)
        self.sum_running += round(facts.num_beside * num_rounds)
        self.sum_elsewhere += facts.num_elsewhere * num_rounds
        self.sum_context += facts.mean_context_tokens * num_rounds
        if facts.expected is not None:
            self._expect(facts.expected, facts.decode_s + (facts.prompt_s or 0.0))
        self.num_rounds += facts.num_rounds
        self.num_sequence_rounds += facts.num_rounds
        self.num_tokens += facts.num_tokens
        self.num_proposed += facts.num_proposed
        self.sequence_s += facts.decode_s
        if facts.prompt_s is not None:
            # Its first token is left out: a pass that reads a prompt is no round that the arms could differ in.
            self.num_prompt_rounds += 1
            self.prompt_sequence_s += facts.prompt_s

    def _expect(self, expected: Expected, sequence_s: float) -> None:
        self.expected_sequence_s += sequence_s
        self.expected_vanilla_s += sequence_s * expected.speedup
        self.expected_low_s += sequence_s * expected.low
        self.expected_high_s += sequence_s * expected.high
        self.uncorrected_vanilla_s += sequence_s * expected.uncorrected
        self.model_sd_s += sequence_s * expected.model_sd

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
    field.name
    for field in fields(Slice)
    if field.name not in ("block_id", "task", "phase", "treatment", "started_at", "against")
)


@dataclass(slots=True)
class Census:
    """All treatment rounds of a task outside its blocks, since its last block: by stratum and treatment.

    With servers, all treated requests that no block counts.
    """

    slices: dict[tuple[Stratum, Treatment], Slice] = field(default_factory=dict)

    def at(self, facts: RoundFacts | RequestFacts, treatment: Treatment) -> Slice:
        """The slice that these rounds, or this request, belong to."""
        key, started_at = (facts.stratum, treatment), facts.started_at
        if key not in self.slices:
            # Requests may start in one moment; slices of one block differ in the moment they begin.
            used = {held.started_at for held in self.slices.values()}
            while started_at in used:
                started_at += timedelta(microseconds=1)
            self.slices[key] = Slice("", "", Phase.BETWEEN, treatment, started_at)
        return self.slices[key]

    def take(self, block_id: str, task: str) -> tuple[Slice, ...]:
        """The slices, and an empty census."""
        slices, self.slices = tuple(self.slices.values()), {}
        for taken in slices:
            taken.block_id, taken.task = block_id, task
        return slices
