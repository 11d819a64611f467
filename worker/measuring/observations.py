"""Observations while prompts are decoded: texts, counts, times. Sums only; rates are computed where they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alphaloop.payoff.figures import Candidate, RoundTimes
from worker.engine import Generation, Step


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


def times_of(steps: Iterable[Step]) -> RoundTimes:
    """The times of these steps, added up."""
    return sum(map(_times_of_step, steps), start=RoundTimes())


def _times_of_step(step: Step) -> RoundTimes:
    if step.num_prefill_tokens:
        return RoundTimes(reading_s=step.wall_s)
    return RoundTimes(
        step.batch, 1, step.wall_s, step.draft_s, step.verify_s, step.num_positions or step.batch * step.width
    )
