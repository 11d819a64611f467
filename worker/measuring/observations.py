"""What is seen while prompts are decoded: texts, counts, times. Sums only; rates are computed where they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from worker.engine import Generation, Step
from worker.measuring.candidates import Candidate


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the time of steps went. A step that read prompts is no round: its parts cannot be told apart."""

    num_rounds: int = 0  #: of single sequences: a step of a batch of 4 is four of them
    num_steps: int = 0
    round_s: float = 0.0  #: steps without prompts
    draft_s: float = 0.0  #: of it, proposing
    verify_s: float = 0.0  #: of it, the target's passes
    num_positions: int = 0  #: that those passes held
    reading_s: float = 0.0  #: steps that read prompts

    @classmethod
    def of(cls, steps: Iterable[Step]) -> RoundTimes:
        """Added up."""
        return sum((cls._of_step(step) for step in steps), start=cls())

    @classmethod
    def _of_step(cls, step: Step) -> RoundTimes:
        if step.num_prefill_tokens:
            return cls(reading_s=step.wall_s)
        return cls(
            step.batch, 1, step.wall_s, step.draft_s, step.verify_s, step.num_positions or step.batch * step.width
        )

    def __add__(self, other: RoundTimes) -> RoundTimes:
        return RoundTimes(
            self.num_rounds + other.num_rounds,
            self.num_steps + other.num_steps,
            self.round_s + other.round_s,
            self.draft_s + other.draft_s,
            self.verify_s + other.verify_s,
            self.num_positions + other.num_positions,
            self.reading_s + other.reading_s,
        )

    @property
    def ms_a_round(self) -> float | None:
        """Milliseconds a round of one sequence takes, its share of the step; None without rounds."""
        return 1000 * self.round_s / self.num_rounds if self.num_rounds else None


@dataclass(frozen=True, slots=True)
class Observation:
    """One block of prompts, decoded together in one way."""

    candidate: Candidate
    block: int
    repeat: int
    generations: tuple[tuple[int, Generation], ...]  #: with the number of each prompt
    times: RoundTimes
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens put out."""
        return sum(generation.counts.num_tokens for _, generation in self.generations)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole block: reading, drafting, decoding, text."""
        return self.num_tokens / self.wall_s


@dataclass(slots=True)
class Measured:
    """All that was seen, by candidate in the order of the tables. Every candidate has seen the same blocks."""

    candidates: Sequence[Candidate]  #: vanilla first
    turns: list[dict[Candidate, Observation]] = field(default_factory=list)
    is_interrupted: bool = False

    def of(self, candidate: Candidate) -> list[Observation]:
        """In the order of the turns, so that lists of two candidates are pairs."""
        return [turn[candidate] for turn in self.turns]

    def generations(self, candidate: Candidate) -> list[tuple[int, Generation]]:
        """Every text of it, with the number of its prompt."""
        return [item for observation in self.of(candidate) for item in observation.generations]
