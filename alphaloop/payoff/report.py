"""The report: every way to decode with its figures, its verdict, and the reasons where it does not ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from alphaloop.engine import ModelSize
from alphaloop.payoff.figures import Candidate, Figures, Judgement
from alphaloop.server_identity import EngineIdentity

_NUM_HALVINGS: Final = 40


@dataclass(frozen=True, slots=True)
class Report:
    """What a measurement found."""

    setup: Setup
    num_turns: int  #: blocks that every candidate decoded
    num_turns_planned: int
    vanilla: Figures
    rows: tuple[Row, ...]
    footprint: Footprint
    notes: tuple[str, ...]
    shipped: Row | None  #: the one to ship
    rivals: tuple[Candidate, ...]  #: that ship too, and are not distinguishable from it
    is_interrupted: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate, judged."""

    figures: Figures
    judgement: Judgement
    costs: RoundParts | None
    reasons: tuple[tuple[str, str], ...]  #: name and sentence; of what ships, only what its total hides

    @property
    def candidate(self) -> Candidate:
        """The way to decode."""
        return self.figures.candidate


@dataclass(frozen=True, slots=True)
class Setup:
    """What was asked for, and of what."""

    identity: EngineIdentity
    num_prompts: int
    prompt_tokens: float  #: median
    max_tokens: int  #: the most that any prompt allows
    temperature: float  #: the highest of the prompts
    batch: int
    num_repeats: int
    bar: float
    seed: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the process that decodes holds in memory."""

    parts: tuple[ModelSize, ...]
    peak_process_bytes: int  #: main memory, with everything that was ever loaded
    device_bytes: int | None  #: the most that was held on GPUs between two texts; None on a CPU
    bytes_by_device: Mapping[str, int] = field(default_factory=dict)  #: the same by GPU


def best_of(rows: Sequence[Row], drafter: str) -> Row:
    """The fastest of a drafter's candidates."""
    return max((row for row in rows if row.candidate.drafter == drafter), key=lambda row: row.figures.ratio.estimate)


@dataclass(frozen=True, slots=True)
class RoundParts:
    """One candidate's rounds in units of a vanilla round, and its reading in units of vanilla's time.

        speed-up of the rounds = tokens a round / R,   R = milliseconds of its round / of a vanilla round
        speed-up of the whole  = 1 / (r' + (1 - r) / speed-up of the rounds)

    with r the share of vanilla's time that goes into reading prompts and r' the candidate's reading over vanilla's time
    (Amdahl 1967). R is split into drafting, the target's pass, and the rest (text, counts).
    """

    num_draft_tokens: int
    tokens: float  #: a round
    positions: float  #: of a pass, for one sequence
    draft: float
    verify: float  #: the pass
    vanilla_verify: float
    rest: float
    vanilla_reading: float  #: r
    reading: float  #: r'
    #: P(position i is proposed) and P(all through i are accepted), from position 1, a round.
    proposed_through: tuple[float, ...]
    accepted_through: tuple[float, ...]

    @property
    def total(self) -> float:
        """R: a round over a vanilla round."""
        return self.draft + self.verify + self.rest

    @property
    def speedup(self) -> float:
        """The speed-up of the whole, as the parts explain it."""
        return self.whole(self.tokens / self.total)

    def whole(self, rounds_speedup: float) -> float:
        """Speed-up of the whole where the rounds are this much faster."""
        return 1 / (self.reading + (1 - self.vanilla_reading) / rounds_speedup)

    @property
    def draft_step(self) -> float | None:
        """c: drafting one token over a vanilla round; None where nothing was proposed."""
        proposed = sum(self.proposed_through)
        return self.draft / proposed if proposed else None

    def at_length(self, k: int) -> float:
        """Modelled speed-up of the whole at a shorter k: drafts cut off after it, costs in proportion."""
        proposed, all_proposed = sum(self.proposed_through[:k]), sum(self.proposed_through)
        part = proposed / all_proposed if all_proposed else 1.0
        verify = self.vanilla_verify + part * (self.verify - self.vanilla_verify)
        tokens = 1 + sum(self.accepted_through[:k])
        return self.whole(tokens / (part * self.draft + verify + self.rest))

    def best_shorter(self) -> tuple[int, float] | None:
        """The best k below this one, and its speed-up relative to this one; None at k = 1."""
        here = self.at_length(self.num_draft_tokens)
        modelled = {k: self.at_length(k) / here for k in range(1, self.num_draft_tokens)}
        return max(modelled.items(), key=lambda item: item[1], default=None)

    def needed_alpha(self, speedup: float) -> float | None:
        """The constant α at which rounds of this cost give `speedup`, drafts being as long; None where even 1 does not.

        Tokens a round are 1 + Σ P(proposed ≥ i) α^i: with full drafts Leviathan et al. 2023, (1 - α^(k+1)) / (1 - α).
        """

        def reached(alpha: float) -> bool:
            tokens = 1 + sum(share * alpha**i for i, share in enumerate(self.proposed_through, 1))
            return self.whole(tokens / self.total) >= speedup

        if not reached(1.0):
            return None
        low, high = 0.0, 1.0
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high


def costs_of(vanilla: Figures, other: Figures) -> RoundParts | None:
    """None where one of them had no round without prompts: texts of a token or two."""
    base, own = vanilla.times, other.times
    if not base.num_rounds or not own.num_rounds or not other.acceptance.num_rounds:
        return None
    unit_s = base.round_s / base.num_rounds
    total_s = base.round_s + base.reading_s
    draft, verify, whole = (seconds / own.num_rounds / unit_s for seconds in (own.draft_s, own.verify_s, own.round_s))
    counts, num_rounds = other.acceptance.counts, other.acceptance.num_rounds
    return RoundParts(
        num_draft_tokens=other.candidate.num_draft_tokens,
        tokens=other.acceptance.tokens_per_round,
        positions=own.num_positions / own.num_rounds,
        draft=draft,
        verify=verify,
        vanilla_verify=base.verify_s / base.num_rounds / unit_s,
        rest=whole - draft - verify,
        vanilla_reading=base.reading_s / total_s,
        reading=own.reading_s / total_s,
        proposed_through=tuple(n / num_rounds for n in counts.proposed),
        accepted_through=tuple(n / num_rounds for n in counts.accepts),
    )
