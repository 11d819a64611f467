"""Acceptance counts and what may be concluded from them.

Words (docs/glossary.md has them all):

* round: draft, one target pass, accept. It yields `accepted + 1` tokens. The prefill is a round without a proposal.
* proposed_i: rounds in which the drafter offered at least i tokens.
* trials_i: rounds in which position i was *tested*: all before it were accepted and a token stood there.
* accepts_i: of those, accepted. α_i = accepts_i / trials_i does not move when k changes; α = Σ accepts / Σ trials does.
* num_forced: tokens that were the only ones allowed at their place; they are taken without a trial, in every mode.

Positions count from 1 in words and from 0 in tuples. A round that ends inside its accepted tokens (end of text, token
limit) is censored: positions after the end count neither as proposed nor as trials.

Intervals are 95 % intervals: Student's t, and `share_interval` of a share, such as α, of trials that come in clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, zip_longest
from statistics import NormalDist
from typing import Final, TypeAlias

from alphaloop.errors import AlphaloopError

Z95: Final = 1.959963984540054


class InconsistentCounts(AlphaloopError, ValueError):
    """Counts that no sequence of rounds can produce."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counts of one job, or of many added up. Tuples hold one integer a draft position."""

    rounds: int = 0
    num_empty_rounds: int = 0
    num_cropped: int = 0
    proposed: tuple[int, ...] = ()
    trials: tuple[int, ...] = ()
    accepts: tuple[int, ...] = ()
    num_forced: int = 0

    def __post_init__(self) -> None:
        if not len(self.proposed) == len(self.trials) == len(self.accepts):
            raise InconsistentCounts(
                f"expected as many positions in proposed, trials and accepts, found "
                f"{len(self.proposed)}, {len(self.trials)}, {len(self.accepts)}"
            )
        if not 0 <= self.num_empty_rounds <= self.rounds:
            raise InconsistentCounts(f"expected 0 to {self.rounds} empty rounds, found {self.num_empty_rounds}")
        offered, reached = self.rounds - self.num_empty_rounds, self.rounds
        for i, (proposed, trials, accepts) in enumerate(zip(self.proposed, self.trials, self.accepts, strict=True)):
            if not (offered >= proposed >= trials >= accepts >= 0 and reached >= trials):
                raise InconsistentCounts(
                    f"position {i + 1}: expected {offered} ≥ proposed ≥ trials ≥ accepts ≥ 0 and trials ≤ {reached}, "
                    f"found {proposed}, {trials}, {accepts}"
                )
            offered, reached = proposed, accepts
        most = self.rounds + self.num_accepted + self.num_forced
        if self.num_forced < 0 or not 0 <= self.num_cropped <= most:
            raise InconsistentCounts(
                f"expected 0 to {most} cropped tokens and no fewer than 0 forced ones, "
                f"found {self.num_cropped} and {self.num_forced}"
            )

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.accepts)

    @property
    def num_trials(self) -> int:
        """Draft positions tested."""
        return sum(self.trials)

    @property
    def num_tokens(self) -> int:
        """Tokens these rounds put out."""
        return self.rounds + self.num_accepted - self.num_cropped + self.num_forced

    def alpha_at(self, position: int) -> float | None:
        """α_i for `position` i ≥ 1; None where it was never tested."""
        if position < 1:
            raise InconsistentCounts(f"expected a position from 1, found {position}")
        if position > len(self.trials) or not self.trials[position - 1]:
            return None
        return self.accepts[position - 1] / self.trials[position - 1]

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            rounds=self.rounds + other.rounds,
            num_empty_rounds=self.num_empty_rounds + other.num_empty_rounds,
            num_cropped=self.num_cropped + other.num_cropped,
            proposed=added(self.proposed, other.proposed),
            trials=added(self.trials, other.trials),
            accepts=added(self.accepts, other.accepts),
            num_forced=self.num_forced + other.num_forced,
        )

    def with_round(
        self,
        num_proposed: int,
        num_accepted: int,
        *,
        num_emitted: int,
        num_tested: int | None = None,
        num_forced: int = 0,
    ) -> AcceptanceCounts:
        """These counts and one more round: `num_emitted` of its `num_accepted + 1` tokens belong to the text.

        A round that ends inside its accepted tokens is censored there. `num_proposed` of a tree is its depth, and
        `num_tested` the depths at which a token was tested: the accepted path may end at a leaf. `num_forced` tokens
        of the text came with the round besides; they are in none of the other numbers.
        """
        rounds = RunningCounts()
        rounds.take_round(
            num_proposed, num_accepted, num_emitted=num_emitted, num_tested=num_tested, num_forced=num_forced
        )
        return self + rounds.counts


class RunningCounts:
    """Rounds that are counted while a text is decoded; `counts` are those of `AcceptanceCounts.with_round`.

    A round adds to a few numbers, whatever its length. Positions are added up when the counts are wanted.
    """

    __slots__ = ("_by_accepted", "_by_proposed", "_by_trials", "num_cropped", "num_forced", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self.num_cropped = 0
        self.num_forced = 0
        # Rounds by how many positions were proposed, tested and accepted, from 0.
        self._by_proposed, self._by_trials, self._by_accepted = [0], [0], [0]

    def take_round(
        self,
        num_proposed: int,
        num_accepted: int,
        *,
        num_emitted: int,
        num_tested: int | None = None,
        num_forced: int = 0,
    ) -> None:
        """Count one more round, as `AcceptanceCounts.with_round` says."""
        reached = min(num_proposed, num_accepted + 1)
        tested = reached if num_tested is None else num_tested
        if not (0 <= num_accepted <= tested <= reached and 0 <= num_emitted <= num_accepted + 1 and num_forced >= 0):
            raise InconsistentCounts(
                f"expected 0 ≤ accepted ≤ tested ≤ proposed, tested and emitted ≤ accepted + 1, and forced ≥ 0, "
                f"found {num_accepted}, {tested}, {num_proposed}, emitted {num_emitted} and forced {num_forced}"
            )
        if num_emitted <= num_accepted:
            num_accepted = tested = num_proposed = num_emitted
        self.rounds += 1
        self.num_cropped += num_accepted + 1 - num_emitted
        self.num_forced += num_forced
        if (num_new := num_proposed + 1 - len(self._by_proposed)) > 0:
            for by_length in (self._by_proposed, self._by_trials, self._by_accepted):
                by_length += [0] * num_new
        self._by_proposed[num_proposed] += 1
        self._by_trials[tested] += 1
        self._by_accepted[num_accepted] += 1

    @property
    def counts(self) -> AcceptanceCounts:
        """Of all rounds taken."""
        return AcceptanceCounts(
            rounds=self.rounds,
            num_empty_rounds=self._by_proposed[0],
            num_cropped=self.num_cropped,
            proposed=_at_least(self._by_proposed),
            trials=_at_least(self._by_trials),
            accepts=_at_least(self._by_accepted),
            num_forced=self.num_forced,
        )


def _at_least(by_length: Sequence[int]) -> tuple[int, ...]:
    """How many rounds have that length or more, by length from 1."""
    return tuple(accumulate(reversed(by_length)))[-2::-1]


#: The round that every job begins with: one token and no draft.
PREFILL: Final = AcceptanceCounts(rounds=1, num_empty_rounds=1)


@dataclass(frozen=True, slots=True)
class ProposerCounts:
    """What one proposer offered inside the rounds of a job, whose proposals several proposers may share.

    A proposer has one trial at depth i of a round where a token of its own stood after the true prefix, that is the
    round's first i - 1 tokens as the text has them, and the text goes on that far. It is accepted there if such a token
    is the text's. So α_i = accepts_i / trials_i estimates the chance that the proposer's token at depth i is the
    target's, given the true prefix and that the proposer had a token there. Siblings in a tree each have their trial,
    in whatever order they were tried: one that follows an accepted sibling was wrong, and is counted so; to count only
    those tried after a rejection would give the chance given that the others were wrong.

    Not nested, unlike a round's own counts: a proposer may begin at depth 3. In a round with a single proposer, they
    are those counts. Two biases stay. A token that two proposers offer at one place stands once, under the first of
    them, so the second's α_i is of places where it offered another one. And in a chain of sampled drafts accepted as a
    block, a token after the accepted ones counts as wrong even where the target draws the same again.
    """

    proposer: str
    trials: tuple[int, ...]
    accepts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.trials) != len(self.accepts):
            raise InconsistentCounts(
                f"{self.proposer}: expected as many positions in trials and accepts, "
                f"found {len(self.trials)} and {len(self.accepts)}"
            )
        for i, (trials, accepts) in enumerate(zip(self.trials, self.accepts, strict=True)):
            if not trials >= accepts >= 0:
                raise InconsistentCounts(
                    f"{self.proposer}, position {i + 1}: expected trials ≥ accepts ≥ 0, found {trials} and {accepts}"
                )


@dataclass(frozen=True, slots=True)
class EvidenceKey:
    """What acceptance depends on: evidence under different keys is never pooled silently.

    `drafter` and `draft_revision` are empty for vanilla decoding. A drafter that ends its drafts early (a confidence
    gate) is a drafter of its own: its drafts reach only easy positions.
    """

    task: str
    target_revision: str
    engine: str
    sampling_bucket: str
    prompt_bucket: str
    segment: str = ""
    drafter: str = ""
    draft_revision: str = ""
    form_bucket: str = ""

    @property
    def columns(self) -> dict[str, str]:
        """The fields by name. `dataclasses.asdict` copies deeply, at 20 µs a key, and every job has several."""
        return {name: getattr(self, name) for name in EvidenceKey.__slots__}


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bounds."""

    mean: float
    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        """Whether all of it lies inside ±margin: the equivalence test of a change (Schuirmann 1987)."""
        return -margin <= self.low and self.high <= margin


def sampling_bucket(
    temperature: float, *, is_cut: bool = False, is_reproducible: bool = False, is_adjusted: bool = False
) -> str:
    """Which sampling settings share a history: greedy, or temperature in steps of .5, and what else changes acceptance.

    `cut`: improbable tokens are left out (top_p, top_k, min_p). `seeded`: drawn by the reproducible coupling, which
    accepts less than the maximal one. `adjusted`: scores carry a bias or a penalty.
    """
    if temperature == 0:
        parts = ["greedy"]
    else:
        parts = ["t<=0.5" if temperature <= 0.5 else "t<=1.0" if temperature <= 1.0 else "t>1.0"]
        parts += ["cut"] * is_cut + ["seeded"] * is_reproducible
    return ",".join([*parts, *["adjusted"] * is_adjusted])


def form_bucket(
    constraint: str | None, has_tools: bool = False, has_images: bool = False, *, is_predicted: bool = False
) -> str:
    """Which forms of jobs share a history; empty for a text without a constraint, after text alone.

    `constraint` is the kind of what the text has to match (`Constraint.kind`), whose families accept alike: a call that
    has to be made is JSON within words that are fixed. `has_tools`: tools that may be called stand in the prompt.
    `is_predicted`: look-up proposes a text that was sent with the job.
    """
    family = [_FAMILIES[constraint]] if constraint else []
    return ",".join([*family, *["tools"] * has_tools, *["images"] * has_images, *["predicted"] * is_predicted])


_FAMILIES: Final = {
    "json_schema": "json",
    "json_object": "json",
    "tools": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


def prompt_bucket(num_prompt_tokens: int) -> str:
    """Which prompt lengths (tokens) share a history."""
    for limit in (256, 1024, 4096):
        if num_prompt_tokens <= limit:
            return f"<={limit}"
    return ">4096"


def added(*counts: Sequence[int]) -> tuple[int, ...]:
    """Sums by position; a shorter one has 0 after its end."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


_NUM_HALVINGS: Final = 50


def counts_from_sums(
    num_tokens: int, num_proposed: int, num_accepted: int, num_draft_tokens: int
) -> AcceptanceCounts | None:
    """The counts at k = `num_draft_tokens` ≥ 1, the round of the prompt among them; None for impossible sums.

    The sums over all positions are the given ones; how they spread over the positions is estimated. As few rounds as
    can hold the proposed tokens are taken to have drafted, because rounds draft k tokens or none, and acceptance is
    taken to be alike at every position.
    """
    if not (0 <= num_accepted <= num_proposed and num_accepted <= num_tokens) or num_tokens < 1:
        return None
    num_drafting = -(-num_proposed // num_draft_tokens)
    # Fewer rounds after the prompt's than drafted mean that the last one was cut.
    rounds = max(num_tokens - num_accepted, num_drafting + 1)
    num_cropped = rounds + num_accepted - num_tokens
    if num_cropped > num_draft_tokens:
        return None
    num_lacking = num_drafting * num_draft_tokens - num_proposed  # to k, of the last round that drafted
    num_whole = num_draft_tokens - num_lacking
    proposed = (*(num_drafting,) * num_whole, *(num_drafting - 1,) * num_lacking)
    accepts = _fitted(_spread(num_accepted, num_drafting, num_draft_tokens), proposed)
    trials = (num_drafting, *map(min, accepts[:-1], proposed[1:]))
    return AcceptanceCounts(rounds, rounds - num_drafting, num_cropped, proposed, trials, accepts)


def _fitted(accepts: Sequence[int], proposed: Sequence[int]) -> tuple[int, ...]:
    """The accepts, at no position more than proposed: the excess goes to the first positions that have room."""
    excess, fitted = 0, []
    for accepted, most in zip(accepts, proposed, strict=True):
        excess += max(0, accepted - most)
        fitted.append(min(accepted, most))
    for place, most in enumerate(proposed):
        moved = min(excess, most - fitted[place])
        fitted[place], excess = fitted[place] + moved, excess - moved
    return tuple(fitted)


def _spread(num_accepted: int, num_drafting: int, k: int) -> tuple[int, ...]:
    """Whole numbers that never grow and add up to `num_accepted`, near num_drafting · α^i for i = 1..k."""
    low, high = 0.0, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_short = num_drafting * sum(middle**i for i in range(1, k + 1)) < num_accepted
        low, high = (middle, high) if is_short else (low, middle)
    sums = [round(value) for value in accumulate(num_drafting * high**i for i in range(1, k + 1))]
    sums[-1] = num_accepted
    steps = [sums[0], *(after - before for before, after in pairwise(sums))]
    return tuple(sorted(steps, reverse=True))


#: Beyond it the normal quantile is right to four digits.
_NEARLY_NORMAL: Final = 1e5
_TINY: Final = 1e-300
#: Newton's steps in the logarithm of t: their number, and their lengths. After one below the least, t is right to all
#: its digits.
_MOST_STEPS: Final = 60
_LEAST_STEP: Final = 1e-8
_LONGEST_STEP: Final = 100.0


def t95(degrees_of_freedom: float) -> float:
    """The t that a variate with these degrees of freedom exceeds in absolute value in 5 % of cases."""
    return t_quantile(degrees_of_freedom, 0.05)


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, tail: float) -> float:
    """The t that such a variate exceeds in absolute value with the probability `tail`.

    Infinite without a degree of freedom. By Newton's steps on the logarithms of t and of the tail, I_x(ν/2, ½) with
    x = ν / (ν + t²) (DLMF 8.17): there the tail is concave, so the steps end at the t from any start.
    """
    if degrees_of_freedom <= 0:
        return math.inf
    t = NormalDist().inv_cdf(1 - tail / 2)
    if degrees_of_freedom >= _NEARLY_NORMAL:
        return t
    half = degrees_of_freedom / 2
    log_front = math.lgamma(half + 0.5) - math.lgamma(half) - math.log(math.pi * degrees_of_freedom) / 2
    for _ in range(_MOST_STEPS):
        beyond = two_sided_tail(t, degrees_of_freedom)
        if not beyond:
            return math.inf
        density = math.exp(log_front - (half + 0.5) * math.log1p(t * t / degrees_of_freedom))
        step = math.log(beyond / tail) * beyond / (2 * t * density)
        t *= math.exp(min(step, _LONGEST_STEP))
        if abs(step) < _LEAST_STEP:
            break
    return t


def two_sided_tail(t: float, degrees_of_freedom: float) -> float:
    """P(|T| > t)."""
    return _incomplete_beta(degrees_of_freedom / (degrees_of_freedom + t * t), degrees_of_freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction (DLMF 8.17.22) in the half where that converges quickly."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d₁/(1 + d₂/(1 + …))), by Lentz's method as modified by Thompson and Barnett (1986)."""
    value = numerator = 1.0
    denominator = 0.0
    for i in range(500):
        m = i // 2
        if i == 0:
            d = 1.0
        elif i % 2 == 0:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        denominator = 1 / _away_from_zero(1 + d * denominator)
        numerator = _away_from_zero(1 + d / numerator)
        step = numerator * denominator
        value *= step
        if i and abs(step - 1) < 1e-14:
            break
    return value - 1


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


#: Accepts and trials of a cluster.
Counts: TypeAlias = tuple[int, int]

#: Clusters that consecutive jobs are put into. Neighbours may be alike beyond a job, because a producer sends several:
#: the means of 10 to 30 long runs of a stream are nearly independent (Schmeiser 1982).
MOST_RUNS: Final = 30
#: Degrees of freedom below which nothing is known about the spread.
_LEAST_DEGREES: Final = 0.25


def share_interval(clusters: Sequence[Counts]) -> Interval | None:
    """Σ accepts / Σ trials with its 95 % interval; None without a trial.

    Clusters are independent of each other; those without a trial do not count. The interval is the whole range where
    one cluster holds nearly all trials.

    The variance of Σa / Σn over clusters is the linearised one (Cochran 1977, §6.4). Every residual is divided by one
    less the cluster's share of the trials, because a large cluster pulls the estimate towards itself (HC3: MacKinnon
    and White 1985; about the jackknife). The degrees of freedom are the effective number of clusters (Σn)² / Σn² (Kish
    1965), less one. Both become an effective number of trials (Korn and Graubard 1998), and the interval is Wilson's
    (1927). How often it holds the truth was simulated (docs/concepts/acceptance.md).
    """
    tested = [(accepts, trials) for accepts, trials in clusters if trials]
    if not tested:
        return None
    num_trials = sum(trials for _, trials in tested)
    share = sum(accepts for accepts, _ in tested) / num_trials
    num_effective = num_trials**2 / sum(trials * trials for _, trials in tested)
    degrees_of_freedom = num_effective - 1
    if degrees_of_freedom < _LEAST_DEGREES:
        return Interval(share, 0.0, 1.0)
    binomial = share * (1 - share)
    variance = max(_variance(tested, share, num_trials), binomial / num_trials)
    # Where all or nothing was accepted no spread can be seen: a cluster may then be one decision.
    effective_trials = binomial / variance if variance else num_effective
    return wilson(share, effective_trials * (Z95 / t95(degrees_of_freedom)) ** 2)


def consecutive_runs(jobs: Sequence[Counts]) -> list[Counts]:
    """Jobs in the order of their decoding, put together into at most `MOST_RUNS` runs of about equal length."""
    tested = [job for job in jobs if job[1]]
    num_runs = min(len(tested), MOST_RUNS)
    numbered = ((index * num_runs // len(tested), job) for index, job in enumerate(tested))
    runs = ([job for _, job in run] for _, run in groupby(numbered, key=lambda pair: pair[0]))
    return [(sum(accepts for accepts, _ in run), sum(trials for _, trials in run)) for run in runs]


def wilson(share: float, trials: float) -> Interval:
    """95 % score interval of a share of `trials` independent trials, which need not be whole (Wilson 1927)."""
    if trials <= 0:
        return Interval(share, 0.0, 1.0)
    centre = (share + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    margin = Z95 / (1 + Z95**2 / trials) * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials * trials))
    return Interval(share, max(0.0, min(share, centre - margin)), min(1.0, max(share, centre + margin)))


def _variance(clusters: Sequence[Counts], share: float, num_trials: int) -> float:
    moved = [(accepts - share * trials) / (num_trials - trials) for accepts, trials in clusters]
    return (len(clusters) - 1) / len(clusters) * sum(residual * residual for residual in moved)
