"""What the experiment is told of an engine round, and the running sums that become slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from alphaloop.switchback.expectation import Expected
from alphaloop.switchback.requests import RequestFacts
from alphaloop.switchback.slices import Phase, Slice, Stratum, Treatment


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
        """Of this round alone."""
        return Stratum.of(self.num_running, self.mean_context_tokens)

    def device_s(self, task: str) -> float:
        """The task's share of the step, by sequences; 0 where it has none."""
        own = self.tasks.get(task)
        return self.wall_s * own.num_sequences / max(self.num_running, own.num_sequences, 1) if own else 0.0


@dataclass(slots=True)
class Tally:
    """Rounds of one task in one arm, while they are added up: of a device, or of requests that servers decoded."""

    started_at: datetime
    num_rounds: int = 0
    num_sequence_rounds: int = 0
    num_tokens: int = 0
    num_proposed: int = 0
    sequence_s: float = 0.0
    sum_running: int = 0
    sum_context: float = 0.0
    num_prompt_rounds: int = 0
    num_prompt_sequence_rounds: int = 0
    num_prompt_tokens: int = 0
    prompt_sequence_s: float = 0.0
    expected_sequence_s: float = 0.0
    expected_vanilla_s: float = 0.0
    expected_low_s: float = 0.0
    expected_high_s: float = 0.0
    uncorrected_vanilla_s: float = 0.0
    model_sd_s: float = 0.0
    sum_elsewhere: float = 0.0

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

    def slice(self, block_id: str, task: str, phase: Phase, treatment: Treatment) -> Slice:
        """What was added up."""
        return Slice(
            block_id=block_id,
            task=task,
            phase=phase,
            treatment=treatment,
            started_at=self.started_at,
            num_rounds=self.num_rounds,
            num_sequence_rounds=self.num_sequence_rounds,
            num_tokens=self.num_tokens,
            num_proposed=self.num_proposed,
            sequence_s=self.sequence_s,
            sum_running=self.sum_running,
            sum_context=self.sum_context,
            num_prompt_rounds=self.num_prompt_rounds,
            num_prompt_sequence_rounds=self.num_prompt_sequence_rounds,
            num_prompt_tokens=self.num_prompt_tokens,
            prompt_sequence_s=self.prompt_sequence_s,
            expected_sequence_s=self.expected_sequence_s,
            expected_vanilla_s=self.expected_vanilla_s,
            expected_low_s=self.expected_low_s,
            expected_high_s=self.expected_high_s,
            uncorrected_vanilla_s=self.uncorrected_vanilla_s,
            model_sd_s=self.model_sd_s,
            sum_elsewhere=self.sum_elsewhere,
        )


@dataclass(slots=True)
class Census:
    """All treatment rounds of a task outside its blocks, since its last block: by stratum and treatment.

    Of servers, all treated requests that no block counts.
    """

    tallies: dict[tuple[Stratum, Treatment], Tally] = field(default_factory=dict)

    def add(self, facts: RoundFacts, own: TaskRound, treatment: Treatment) -> None:
        """One more round."""
        self._tally(facts.stratum, treatment, facts.started_at).add(facts, own)

    def add_request(self, facts: RequestFacts, treatment: Treatment) -> None:
        """One more request."""
        self._tally(facts.stratum, treatment, facts.started_at).add_request(facts)

    def _tally(self, stratum: Stratum, treatment: Treatment, started_at: datetime) -> Tally:
        key = (stratum, treatment)
        if key not in self.tallies:
            # Requests may start in one moment; slices of one block are told apart by the moment they begin.
            used = {tally.started_at for tally in self.tallies.values()}
            while started_at in used:
                started_at += timedelta(microseconds=1)
            self.tallies[key] = Tally(started_at)
        return self.tallies[key]

    def take(self, block_id: str, task: str) -> tuple[Slice, ...]:
        """The slices, and an empty census."""
        slices = tuple(t.slice(block_id, task, Phase.BETWEEN, treatment) for (_, treatment), t in self.tallies.items())
        self.tallies = {}
        return slices
