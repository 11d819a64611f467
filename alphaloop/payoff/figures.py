"""What was seen of one way to decode, as figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from alphaloop.acceptance import AcceptanceCounts, Interval
from alphaloop.clustered_share import share_interval
from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Mode
from alphaloop.payoff.bounds import Block, Bounds, percentile


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to decode every prompt. Vanilla has no drafter."""

    drafter: str | None = None
    num_draft_tokens: int = 0
    draft_revision: str | None = None

    @property
    def name(self) -> str:
        """As people read it."""
        return "vanilla" if self.drafter is None else f"{self.drafter} k={self.num_draft_tokens}"

    @property
    def decision(self) -> Decision:
        """As the engine takes it."""
        mode = Mode.VANILLA if self.drafter is None else Mode.SPECULATIVE
        return Decision(mode, self.drafter, self.draft_revision, self.num_draft_tokens, Reason.FORCED, "measured")


VANILLA: Final = Candidate()


@dataclass(frozen=True, slots=True)
class Tails:
    """Percentiles over texts."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of one value or more."""
        return cls(*(percentile(values, share) for share in (0.50, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of some texts, every text's first round (its prompt) left out of the rates. Prompts are the clusters."""

    by_prompt: tuple[AcceptanceCounts, ...]
    num_texts: int

    @classmethod
    def of(cls, texts: Sequence[tuple[int, AcceptanceCounts]]) -> Self:
        """From every text's counts with the number of its prompt. Repeats of a prompt are one cluster."""
        found: dict[int, AcceptanceCounts] = defaultdict(AcceptanceCounts)
        for number, counts in texts:
            found[number] += counts
        return cls(tuple(found.values()), len(texts))

    @property
    def counts(self) -> AcceptanceCounts:
        """All texts together."""
        return sum(self.by_prompt, start=AcceptanceCounts())

    @property
    def num_rounds(self) -> int:
        """Rounds in which something could be proposed."""
        return max(0, self.counts.rounds - self.num_texts)

    @property
    def tokens_per_round(self) -> float:
        """1 where no round followed the first."""
        return (self.counts.num_tokens - self.num_texts) / self.num_rounds if self.num_rounds else 1.0

    @property
    def proposed_per_round(self) -> float:
        """Mean length of a proposal, empty ones among them."""
        return sum(self.counts.proposed) / self.num_rounds if self.num_rounds else 0.0

    @property
    def empty_share(self) -> float:
        """Share of rounds without a proposal."""
        return (self.counts.num_empty_rounds - self.num_texts) / self.num_rounds if self.num_rounds else 0.0

    @property
    def alpha(self) -> Interval | None:
        """Pooled α with its 95 % bounds; None where nothing was tested."""
        return share_interval([(c.num_accepted, c.num_trials) for c in self.by_prompt])

    def alpha_at(self, position: int) -> Interval | None:
        """α_i for `position` i ≥ 1."""
        i = position - 1
        return share_interval([(c.accepts[i], c.trials[i]) for c in self.by_prompt if i < len(c.trials)])


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


@dataclass(frozen=True, slots=True)
class Exactness:
    """Texts of one candidate against vanilla's, each prompt once."""

    num_equal: int = 0
    num_near_ties: int = 0
    num_wrong: int = 0  #: different, and not at a near-tie
    num_unexamined: int = 0  #: different, and whether at a near-tie is not known
    num_sampled: int = 0  #: drawn without a seed: nothing to compare

    @property
    def is_exact(self) -> bool:
        """Whether no text is known to be wrong."""
        return not self.num_wrong

    @property
    def num_compared(self) -> int:
        """Texts that should be vanilla's."""
        return self.num_equal + self.num_near_ties + self.num_wrong + self.num_unexamined


@dataclass(frozen=True, slots=True)
class Figures:
    """What was seen of one candidate."""

    candidate: Candidate
    tokens_per_s: float  #: of all blocks together
    blocks: tuple[Block, ...]  #: the same prompts in the same order for every candidate
    ratios: tuple[float, ...]  #: of each block's tokens a second to vanilla's, in the order of the blocks
    ratio: Bounds  #: of all tokens over all seconds, to vanilla's: a prompt weighs as much as its time
    median: Bounds  #: of `ratios`
    first_token_s: Tails
    token_s: Tails | None  #: between the first token and the end, a token; None where every text has one token
    response_s: Tails
    output_tokens: float  #: median
    acceptance: Acceptance
    times: RoundTimes
    exactness: Exactness
