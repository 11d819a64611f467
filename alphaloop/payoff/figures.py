"""What was seen of one way to decode, how much faster than vanilla it is, and whether it ships. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from alphaloop.acceptance import AcceptanceCounts, Interval, share_interval, t_quantile
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.messages import Mode

LEVEL: Final = 0.95
#: Degrees of freedom below which nothing is known about the spread.
_LEAST_DEGREES: Final = 0.25
#: A logarithm beyond which a bound says nothing: a factor of 10^43.
_LARGEST_LOG: Final = 100.0
#: A further run settles it with 80 % probability: (1.96 + .84) / 1.96 times the room that the bounds need.
_POWER: Final = 1.43
#: Most values that are worth measuring; beyond, the ratio counts as the bar.
_MOST_VALUES: Final = 2000


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
class PromptBlock:
    """Prompts decoded together in one way, all repeats added up."""

    num_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the whole block."""
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What was seen of one candidate."""

    candidate: Candidate
    tokens_per_s: float  #: of all blocks together
    blocks: tuple[PromptBlock, ...]  #: the same prompts in the same order for every candidate
    ratios: tuple[float, ...]  #: of each block's tokens a second to vanilla's, in the order of the blocks
    ratio: RatioBounds  #: of all tokens over all seconds, to vanilla's: a prompt weighs as much as its time
    median: RatioBounds  #: of `ratios`
    first_token_s: Tails
    token_s: Tails | None  #: between the first token and the end, a token; None where every text has one token
    response_s: Tails
    output_tokens: float  #: median
    acceptance: Acceptance
    times: RoundTimes
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class Tails:
    """Percentiles over texts."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The percentiles of one value or more."""
        return cls(*(percentile(values, share) for share in (0.50, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of some texts, every text's first round (its prompt) left out of the rates. Prompts are the clusters."""

    by_prompt: tuple[AcceptanceCounts, ...]
    num_texts: int

    @classmethod
    def of(cls, texts: Sequence[tuple[int, AcceptanceCounts]]) -> Self:
        """From every text's counts with the number of its prompt. Repeats of a prompt are one cluster."""
        by_prompt: dict[int, AcceptanceCounts] = defaultdict(AcceptanceCounts)
        for number, counts in texts:
            by_prompt[number] += counts
        return cls(tuple(by_prompt.values()), len(texts))

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
        """Without forced tokens, which come in every mode; 1 where no round followed the first."""
        counts = self.counts
        own = counts.num_tokens - counts.num_forced - self.num_texts
        return own / self.num_rounds if self.num_rounds else 1.0

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
    """Where the time of steps went. A step that read prompts is no round: its parts were not timed separately."""

    num_rounds: int = 0  #: of single sequences: a step of a batch of 4 is four of them
    num_steps: int = 0
    round_s: float = 0.0  #: steps without prompts
    draft_s: float = 0.0  #: of it, proposing
    verify_s: float = 0.0  #: of it, the target's passes
    num_positions: int = 0  #: that those passes held
    reading_s: float = 0.0  #: steps that read prompts

    def __add__(self, other: RoundTimes) -> RoundTimes:
        return RoundTimes(*(getattr(self, name) + getattr(other, name) for name in RoundTimes.__slots__))


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
class RatioBounds:
    """A ratio and its bounds; None where there are too few values for any."""

    estimate: float
    low: float | None
    high: float | None
    num_values: int

    @property
    def known(self) -> tuple[float, float] | None:
        """Both bounds, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def total_bounds(ours: Sequence[PromptBlock], theirs: Sequence[PromptBlock], num_comparisons: int = 1) -> RatioBounds:
    """Tokens a second of all blocks together, ours over theirs; block i of both holds the same prompts.

    With 95 % probability all of `num_comparisons` such bounds hold. There are none below `min_values` blocks, nor
    where one block holds nearly all of the time.

    *Of all tokens*: tokens over seconds. That is what a device is paid for, and the verdict rests on it. Blocks are the
    unit. The variance of the logarithm is linearised (Cochran 1977, §6.4); each block's residual is divided by one less
    the block's share (HC3: MacKinnon and White 1985). The degrees of freedom of Student's t are the effective number of
    blocks (Kish 1965), less one. Several candidates share the 5 % that may be wrong (Bonferroni), so that the best of
    them may be picked afterwards.
    """
    sides = _shares(ours), _shares(theirs)
    estimate, n = _together(ours).tokens_per_s / _together(theirs).tokens_per_s, len(ours)
    share = [(time + other) / 2 for (_, time), (_, other) in zip(*sides, strict=True)]
    degrees_of_freedom = 1 / sum(part * part for part in share) - 1
    if n < min_values(num_comparisons) or degrees_of_freedom < _LEAST_DEGREES:
        return RatioBounds(estimate, None, None, n)
    # What a block moves the logarithm of a side's speed by is its share of the tokens less that of the time.
    moved = [
        ((tokens - time) - (their_tokens - their_time)) / (1 - part)
        for (tokens, time), (their_tokens, their_time), part in zip(*sides, share, strict=True)
    ]
    variance = (n - 1) / n * sum(change * change for change in moved)
    margin = t_quantile(degrees_of_freedom, (1 - LEVEL) / num_comparisons) * math.sqrt(variance)
    return RatioBounds(
        estimate, estimate * math.exp(-min(margin, _LARGEST_LOG)), estimate * math.exp(min(margin, _LARGEST_LOG)), n
    )


def median_bounds(values: Sequence[float], num_comparisons: int = 1) -> RatioBounds:
    """The median of independent `values`; with 95 % probability all of `num_comparisons` such bounds hold.

    Order statistics: of n independent ratios the number below the true median is binomial(n, 1/2), whatever their
    distribution (the sign test; Conover 1999, §3.2). They are exact at every n, where a percentile bootstrap of a
    median covers 91 to 94 % instead of 95 with 10 to 20 prompts and several candidates.
    """
    ordered = sorted(values)
    n = len(ordered)
    allowed = (1 - LEVEL) / 2 / num_comparisons
    # The (j+1)-th smallest is above the true median with the probability that at most j of n lie below it.
    j, below = -1, 0.5**n
    while below <= allowed:
        j += 1
        below += math.comb(n, j + 1) * 0.5**n
    median = statistics.median(ordered)
    return RatioBounds(median, None, None, n) if j < 0 else RatioBounds(median, ordered[j], ordered[n - 1 - j], n)


def min_values(num_comparisons: int) -> int:
    """How many values it takes to bound `num_comparisons` medians at once."""
    return math.ceil(math.log2(2 * num_comparisons / (1 - LEVEL)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie, interpolated (Hyndman & Fan 1996, type 7)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class ShipVerdict(StrEnum):
    """What the figures say about one candidate."""

    SHIP = "ship"  #: the lower bound of the ratio of all tokens reaches the bar, and is above 1
    DO_NOT_SHIP = "do not ship"  #: the upper bound is below the bar, or a text is wrong
    TOO_CLOSE = "too close"  #: the bar lies between the bounds


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and what it would take to settle one that is too close."""

    verdict: ShipVerdict
    num_more: int | None = None  #: further values; None: settled, or as good as at the bar


def judge(bounds: RatioBounds, bar: float, num_comparisons: int, *, is_exact: bool = True) -> Judgement:
    """The verdict on a candidate whose ratio to vanilla, of all tokens, has these bounds.

    A candidate that writes another text than vanilla never ships, nor one that may be slower than vanilla, however low
    the bar is.
    """
    if not is_exact:
        return Judgement(ShipVerdict.DO_NOT_SHIP)
    if bounds.known is None:
        return Judgement(ShipVerdict.TOO_CLOSE, max(1, min_values(num_comparisons) - bounds.num_values))
    low, high = bounds.known
    if low >= bar and low > 1:
        return Judgement(ShipVerdict.SHIP)
    if high < bar:
        return Judgement(ShipVerdict.DO_NOT_SHIP)
    return Judgement(ShipVerdict.TOO_CLOSE, _num_more(bounds.estimate, low, high, bar, bounds.num_values))


def _num_more(estimate: float, low: float, high: float, bar: float, num_values: int) -> int | None:
    """Bounds narrow with the square root of the number of values; ratios are compared by their logarithms."""
    distance = abs(math.log(estimate / bar))
    room = math.log(estimate / low) if estimate >= bar else math.log(high / estimate)
    if distance * math.sqrt(_MOST_VALUES / num_values) <= _POWER * room:
        return None
    return max(1, math.ceil(num_values * (_POWER * room / distance) ** 2) - num_values)


def _shares(blocks: Sequence[PromptBlock]) -> list[tuple[float, float]]:
    """Each block's part of all tokens and of the whole time."""
    whole = _together(blocks)
    return [(block.num_tokens / whole.num_tokens, block.wall_s / whole.wall_s) for block in blocks]


def _together(blocks: Sequence[PromptBlock]) -> PromptBlock:
    return PromptBlock(sum(block.num_tokens for block in blocks), sum(block.wall_s for block in blocks))
