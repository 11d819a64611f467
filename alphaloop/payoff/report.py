"""The report: every way to decode with its figures, its verdict, and the reasons where it does not ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alphaloop.payoff.figures import Candidate, Figures
from alphaloop.payoff.rounds import RoundCosts
from alphaloop.payoff.verdict import Judgement
from alphaloop.server_identity import EngineIdentity


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
class Part:
    """A model that is loaded. A drafter without weights is no part."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_slot: int  #: of a sequence that fills the context
    device: str = ""  #: where it lies: `cuda:1`


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of the process that decodes."""

    parts: tuple[Part, ...]
    peak_process_bytes: int  #: main memory, with everything that was ever loaded
    device_bytes: int | None  #: the most that was held on GPUs between two texts; None on a CPU
    bytes_by_device: Mapping[str, int] = field(default_factory=dict)  #: the same by GPU


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate, judged."""

    figures: Figures
    judgement: Judgement
    costs: RoundCosts | None
    reasons: tuple[tuple[str, str], ...]  #: name and sentence; of what ships, only what its total hides

    @property
    def candidate(self) -> Candidate:
        """The way to decode."""
        return self.figures.candidate


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


def best_of(rows: Sequence[Row], drafter: str) -> Row:
    """The fastest of a drafter's candidates."""
    return max((row for row in rows if row.candidate.drafter == drafter), key=lambda row: row.figures.ratio.estimate)
