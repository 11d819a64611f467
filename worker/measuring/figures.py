"""What was seen of one candidate, as the figures that people read. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from alphaloop.acceptance import AcceptanceCounts, Interval, design_effect, wilson
from worker.engine import Generation
from worker.measuring.bounds import Bounds, median_bounds, percentile
from worker.measuring.candidates import VANILLA, Candidate
from worker.measuring.exactness import Exactness
from worker.measuring.observations import Measured, Observation, RoundTimes


@dataclass(frozen=True, slots=True)
class Tails:
    """Percentiles over texts."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None without values."""
        return cls(*(percentile(values, share) for share in (0.50, 0.95, 0.99))) if values else None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of some texts, every text's first round (its prompt) left out of the rates. Prompts are the clusters."""

    by_prompt: tuple[AcceptanceCounts, ...]
    num_texts: int

    @classmethod
    def of(cls, generations: Sequence[tuple[int, Generation]]) -> Self:
        """Repeats of a prompt are one cluster."""
        found: dict[int, AcceptanceCounts] = defaultdict(AcceptanceCounts)
        for number, generation in generations:
            found[number] += generation.counts
        return cls(tuple(found.values()), len(generations))

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
        return self._interval([(c.num_accepted, c.num_trials) for c in self.by_prompt])

    def alpha_at(self, position: int) -> Interval | None:
        """α_i for `position` i ≥ 1."""
        i = position - 1
        return self._interval([(c.accepts[i], c.trials[i]) for c in self.by_prompt if i < len(c.trials)])

    @staticmethod
    def _interval(pairs: Sequence[tuple[int, int]]) -> Interval | None:
        tested = [(a, n) for a, n in pairs if n]
        if not tested:
            return None
        accepts, trials = (sum(column) for column in zip(*tested, strict=True))
        effect = design_effect(
            len(tested),
            accepts,
            trials,
            sum(a * a for a, _ in tested),
            sum(n * n for _, n in tested),
            sum(a * n for a, n in tested),
        )
        return wilson(accepts, trials, effect)


@dataclass(frozen=True, slots=True)
class Figures:
    """One candidate."""

    candidate: Candidate
    tokens_per_s: float  #: median over blocks
    ratios: tuple[float, ...]  #: of each block's tokens a second to vanilla's, in the order of the blocks
    ratio: Bounds  #: their median
    ratio_of_totals: float  #: of all tokens over all seconds; None of the prompts weighs more than its time
    first_token_s: Tails
    token_s: Tails | None  #: between the first token and the end, a token; None where every text has one token
    response_s: Tails
    output_tokens: float  #: median
    acceptance: Acceptance
    times: RoundTimes
    exactness: Exactness


def figures_of(measured: Measured, candidate: Candidate, exactness: Exactness, num_comparisons: int) -> Figures:
    """Of a candidate, over the turns that were finished; there must be one."""
    observations = measured.of(candidate)
    baseline = measured.of(VANILLA)
    texts = [generation for _, generation in measured.generations(candidate)]
    ratios = paired_ratios(observations, baseline)
    return Figures(
        candidate=candidate,
        tokens_per_s=statistics.median(observation.tokens_per_s for observation in observations),
        ratios=tuple(ratios),
        ratio=median_bounds(ratios, num_comparisons),
        ratio_of_totals=_total(observations) / _total(baseline),
        first_token_s=_tails([text.time_to_first_token_s for text in texts]),
        token_s=Tails.of(
            [
                (text.wall_s - text.time_to_first_token_s) / (text.counts.num_tokens - 1)
                for text in texts
                if text.counts.num_tokens > 1
            ]
        ),
        response_s=_tails([text.wall_s for text in texts]),
        output_tokens=statistics.median(text.counts.num_tokens for text in texts),
        acceptance=Acceptance.of(measured.generations(candidate)),
        times=sum((observation.times for observation in observations), start=RoundTimes()),
        exactness=exactness,
    )


def paired_ratios(ours: Sequence[Observation], theirs: Sequence[Observation]) -> list[float]:
    """Of every block, by its number, the ratio of tokens a second; of its repeats the median.

    Blocks are what is independent of each other, repeats are not.
    """
    by_block: dict[int, list[float]] = defaultdict(list)
    for one, other in zip(ours, theirs, strict=True):
        by_block[one.block].append(one.tokens_per_s / other.tokens_per_s)
    return [statistics.median(by_block[block]) for block in sorted(by_block)]


def _total(observations: Sequence[Observation]) -> float:
    return sum(o.num_tokens for o in observations) / sum(o.wall_s for o in observations)


def _tails(values: Sequence[float]) -> Tails:
    found = Tails.of(values)
    assert found is not None  # noqa: S101 - a finished turn has texts
    return found
