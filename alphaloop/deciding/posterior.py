"""The posterior of one drafter: tokens a round at every k, with standard deviations, and tokens proposed.

Let N be the mean tokens a round of a task, which is not known. A text of n tokens takes n / N rounds, and time follows
rounds. So E[1 / N], the expected rounds a token, decides, and the tokens a round expected here are its inverse:

    tokens = 1 / E[1 / N]        sd = tokens · sd(ln N)

`tokens` is at most E[N], because 1 / N is convex. They differ where N is hardly known: the prior of look-up for an
unknown task has E[N] = 2.51 and tokens = 1.74 at k = 12 (decision 27).

A profile is a normal posterior of how far drafts go, in logits by position; counts update it.

    logit s_i = m_i + b_i·δ + ε_i      δ ~ N(0, common_var), ε_i ~ N(0, own_var_i)

s_i = reach_i · α_i is the probability that a round which got through position i - 1 gets through i. All tokens a round
follow from these, and one count, accepts over chances, estimates the product. δ moves all positions together: a task
with high acceptance at the first three positions is expected to have high acceptance at the fourth too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Final, TypeAlias

from alphaloop.acceptance import t95
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError

#: Standard deviation of each position by itself, over that of all positions together.
_OWN_SHARE: Final = 0.3
_NEWTON_STEPS: Final = 12
#: The prior of how much jobs differ: the information of one job about δ, and the jobs that this prior weighs.
JOB_INFORMATION: Final = 4.0
ASSUMED_JOBS: Final = 8.0
#: A drafter with fewer jobs in a task is cold.
_MIN_JOBS: Final = 4
#: Jobs of a measured speed-up, with which the bounds of an expectation will be compared.
MEASURED_JOBS: Final = 24
#: Standard deviation (logits) between what was seen of texts and what lies beyond their limits; .59 over 13 real tasks.
_BEYOND_SD: Final = 0.5
Floats: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Effective (design effect taken out) accepts and chances by position."""

    accepts: tuple[float, ...]
    chances: tuple[float, ...]

    def scaled(self, factor: float) -> Counts:
        """The same rates from `factor` times as much evidence."""
        return Counts(tuple(a * factor for a in self.accepts), tuple(c * factor for c in self.chances))


@dataclass(frozen=True, slots=True)
class Profile:
    """Normal distribution of logit s_i by position: mean, and the factor model above."""

    mean: tuple[float, ...]
    common_var: float
    own_var: tuple[float, ...]
    loading: tuple[float, ...]
    goes_on: bool = False  #: drafts are copies, which go on in the next round where k cut them

    @classmethod
    def around(cls, probabilities: Sequence[float], spread: float, *, goes_on: bool = False) -> Profile:
        """A prior: these s_i, with a standard deviation of `spread` logits."""
        size, own = len(probabilities), (spread * _OWN_SHARE) ** 2
        return cls(tuple(map(logit, probabilities)), spread**2, (own,) * size, (1.0,) * size, goes_on)

    def widened(self, spread: float) -> Profile:
        """For one of several groups that differ by `spread`. Loadings become 1, each position keeps its variance."""
        shared = min(self.loading, default=1.0) ** 2
        own = (spread * _OWN_SHARE) ** 2
        return Profile(
            self.mean,
            self.common_var * shared + spread**2,
            tuple(
                v + own + self.common_var * (b * b - shared) for v, b in zip(self.own_var, self.loading, strict=True)
            ),
            (1.0,) * len(self.mean),
            self.goes_on,
        )

    def updated(self, counts: Counts) -> Profile:
        """After `counts`. If drafts go on, which rounds do so follows from the profile itself, so it is asked twice."""
        if not self.goes_on:
            return self._updated(counts)
        return self._updated(joined(counts, self._updated(joined(counts, self.probabilities())).probabilities()))

    def _updated(self, counts: Counts) -> Profile:
        """The mode and curvature of the posterior (Laplace), by Newton's method in O(positions).

        Expects loadings of 1. The Hessian is an arrow (δ touches every ε_i), so its Schur complement is one number.
        """
        if not any(counts.chances):
            return self
        size = len(self.mean)
        accepts, chances = fitted(counts.accepts, size), fitted(counts.chances, size)
        common, own = 0.0, [0.0] * size
        prior_var, own_var = max(self.common_var, 1e-9), self.own_var
        for _ in range(_NEWTON_STEPS):
            p = [logistic(m + common + e) for m, e in zip(self.mean, own, strict=True)]
            h = [n * x * (1 - x) for n, x in zip(chances, p, strict=True)]
            r = [a - n * x for a, n, x in zip(accepts, chances, p, strict=True)]
            schur = 1 / prior_var + sum(hi / (1 + hi * v) for hi, v in zip(h, own_var, strict=True))
            rest = sum(hi * (ri * v - e) / (1 + hi * v) for hi, ri, v, e in zip(h, r, own_var, own, strict=True))
            step = clamped((sum(r) - common / prior_var - rest) / schur)
            moved = [
                clamped((ri * v - e - hi * v * step) / (1 + hi * v))
                for e, ri, hi, v in zip(own, r, h, own_var, strict=True)
            ]
            own = [e + more for e, more in zip(own, moved, strict=True)]
            common += step
            if abs(step) < 1e-3 and max(map(abs, moved)) < 1e-3:
                break
        return Profile(
            tuple(m + common + e for m, e in zip(self.mean, own, strict=True)),
            1 / schur,
            tuple(v / (1 + hi * v) for hi, v in zip(h, own_var, strict=True)),
            tuple(1 / (1 + hi * v) for hi, v in zip(h, own_var, strict=True)),
            self.goes_on,
        )

    def probabilities(self, shift: float = 0.0) -> tuple[float, ...]:
        """s_i with δ at `shift` standard deviations."""
        move = shift * math.sqrt(self.common_var)
        return tuple(logistic(m + b * move) for m, b in zip(self.mean, self.loading, strict=True))

    def moved(self, logits: float) -> Profile:
        """All positions better by `logits`."""
        return replace(self, mean=tuple(m + logits for m in self.mean))


def total(groups: Iterable[Counts]) -> Counts:
    accepts: list[float] = []
    chances: list[float] = []
    for group in groups:
        short = len(group.chances) - len(chances)
        accepts += [0.0] * short
        chances += [0.0] * short
        for i, (a, n) in enumerate(zip(group.accepts, group.chances, strict=True)):
            accepts[i] += a
            chances[i] += n
    return Counts(tuple(accepts), tuple(chances))


def joined(counts: Counts, through: Sequence[float]) -> Counts:
    """The counts without the rounds in which copies that k cut went on; `through` are the s_i.

    `accepts_j - chances_{j+1}` rounds with k = j were accepted whole. Where the copy holds at j + 1, the target's own
    token, the next round begins within it, at an easier j + 2: a share `near` within reach of the longest draft, which
    would begin anew beyond. Each count is split by the odds of both kinds of rounds.
    """
    size = len(through)
    accepts, chances = fitted(counts.accepts, size), fitted(counts.chances, size)
    far = [1.0, *accumulate((*through, *(through[-1],) * 3 * size), mul)]
    near = [sum(far[j : size : j + 1]) / sum(far[j :: j + 1]) for j in range(size)]
    within = {j: near[j] * max(0.0, accepts[j - 1] - chances[j]) * through[j] for j in range(1, size)}
    begun = max(chances[0] - sum(within.values()), 0.02 * chances[0])
    if begun == chances[0]:
        return counts
    kept = Counts((), ())
    for i, s in enumerate(through):
        right = {j: rounds * through[min(j + 1 + i, size - 1)] for j, rounds in within.items()}
        held, ended = sum(right.values()), sum(within.values()) - sum(right.values())
        accepted = accepts[i] * begun * s / (begun * s + held)
        missed = (chances[i] - accepts[i]) * begun * (1 - s) / (begun * (1 - s) + ended)
        kept = Counts((*kept.accepts, accepted), (*kept.chances, accepted + missed))
        begun, within = begun * s, right
    return kept


def fitted(values: Sequence[float], size: int) -> tuple[float, ...]:
    return (*values, *(0.0,) * (size - len(values)))[:size]


def logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def clamped(step: float) -> float:
    return min(max(step, -2.0), 2.0)


#: Gauss–Hermite nodes and weights for δ, three points.
_NODES: Final = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))


@dataclass(frozen=True, slots=True)
class Posterior:
    """The posterior of a drafter for one key; tuples by k from 0 (`tokens`) or by position (the others)."""

    profile: Profile
    reach: tuple[float, ...]  #: P(a token is proposed at i | accepted through i - 1)
    jobs: float  #: effective jobs of this task that it rests on
    design_effect: float
    kept: float = 1.0  #: share of older evidence's weight that the recent window left
    #: P(a token is proposed at i | proposed through i - 1), accepted or not; empty: as `reach`. `reach` does not give
    #: the length of a draft, because drafters with a confidence gate draft further where they are right.
    offered: tuple[float, ...] = ()
    error: ExpectationError = NO_ERROR  #: what measured speed-ups say of the drafter's expectations in this task
    job_information: float = JOB_INFORMATION  #: of one job about δ: its inverse is the variance between jobs
    text_tokens: float = 0.0  #: mean length of the texts that were seen; 0: not known
    tokens: tuple[float, ...] = field(init=False)  #: tokens a round at k, 1 / E[rounds a token]
    common_sd: tuple[float, ...] = field(init=False)  #: of tokens at k, from what moves all positions together
    slopes: tuple[tuple[float, ...], ...] = field(init=False)  #: at k: tokens · ∂ln N/∂ε_i · sd(ε_i), by i
    tokens_sd: tuple[float, ...] = field(init=False)  #: of tokens at k
    elasticity: tuple[float, ...] = field(init=False)  #: at k: ∂ln N/∂δ, with loadings of 1
    proposed: tuple[float, ...] = field(init=False)  #: mean tokens proposed a round at k
    #: Tokens a round by k as goodput counts them: those of drafts as measured speed-ups correct them.
    corrected_tokens: tuple[float, ...] = field(init=False)

    @property
    def is_cold(self) -> bool:
        """Whether fewer than four jobs are known. Four that differ a little in age are a little less: 3.99."""
        return round(self.jobs) < _MIN_JOBS

    def __post_init__(self) -> None:
        tokens, common_sd, slopes, elasticity = _expected(self.profile)
        variance = [c * c + sum(s * s for s in row) for c, row in zip(common_sd, slopes, strict=True)]
        proposed, through = [0.0], 1.0
        for r in self.offered or self.reach:
            through *= r
            proposed.append(proposed[-1] + through)
        for name, value in (
            ("tokens", tokens),
            ("common_sd", common_sd),
            ("slopes", slopes),
            ("tokens_sd", tuple(math.sqrt(v) for v in variance)),
            ("elasticity", elasticity),
            ("proposed", tuple(proposed)),
            ("corrected_tokens", (tokens[0], *(self.error.factor * value for value in tokens[1:]))),
        ):
            object.__setattr__(self, name, value)

    @property
    def through(self) -> tuple[float, ...]:
        """s_i = reach_i · α_i."""
        return self.profile.probabilities()

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that `tokens` knows."""
        return len(self.reach)

    def longest_proposed(self, batch: int) -> tuple[float, ...]:
        """Mean tokens of the longest of `batch` proposals by k, from 0: Σ_{i≤k} 1 - (1 - P(one has i tokens))^batch."""
        if batch == 1:
            return self.proposed
        longest, total, before = [0.0], 0.0, 0.0
        for proposed in self.proposed[1:]:
            total += 1 - (1 - (proposed - before)) ** batch
            longest.append(total)
            before = proposed
        return tuple(longest)

    def relative_sd(self, k: int, num_tokens: float = 1.0) -> float:
        """Standard deviation of ln(tokens a round) at k.

        The share of a text of `num_tokens` that no seen text reached may differ from the texts that were seen.
        """
        beyond = max(0.0, 1 - self.text_tokens / num_tokens) if self.text_tokens else 0.0
        return math.hypot(self.tokens_sd[k] / self.tokens[k], beyond * _BEYOND_SD * self.elasticity[k])

    def tokens_bounds(self, k: int, num_tokens: float = 1.0) -> tuple[float, float]:
        """The 95 % interval of tokens a round of `MEASURED_JOBS` further jobs at k, within the possible 1 to k + 1.

        Those are other jobs, so how jobs differ counts too. That itself is known from few jobs: hence Student's t.
        """
        tokens = self.tokens[k]
        of_jobs = self.elasticity[k] / math.sqrt(MEASURED_JOBS * self.job_information)
        degrees = round(ASSUMED_JOBS + max(0.0, self.jobs - 1))
        factor = math.exp(t95(degrees) * math.hypot(self.relative_sd(k, num_tokens), of_jobs))
        return max(1.0, tokens / factor), min(k + 1.0, tokens * factor)

    def tokens_moved(self, logits: float) -> tuple[float, ...]:
        """`tokens` if every position were better by `logits`, and no less uncertain."""
        return _expected(self.profile.moved(logits))[0]


def _expected(profile: Profile) -> tuple[Floats, Floats, tuple[Floats, ...], Floats]:
    """`tokens`, `common_sd`, `slopes` and `elasticity` of a posterior.

    E over δ by quadrature; E over each ε_i by the second-order term of 1 / N, which is var(N) / N² because N is linear
    in every s_i.
    """
    at_nodes = [tokens_per_round(profile.probabilities(z), goes_on=profile.goes_on) for z, _ in _NODES]
    weights = [w for _, w in _NODES]
    elasticities, own_sd = _elasticities(profile), [math.sqrt(v) for v in profile.own_var]
    relative = [tuple(map(mul, row, own_sd)) for row in elasticities]
    tokens, common_sd = [], []
    for k, (row, *values) in enumerate(zip(relative, *at_nodes, strict=True)):
        rounds = sum(w / value for w, value in zip(weights, values, strict=True))
        rounds *= 1 + sum(slope * slope for slope in row)
        tokens.append(min(max(1.0, 1 / rounds), k + 1.0))
        logs = [math.log(value) for value in values]
        mean = sum(w * x for w, x in zip(weights, logs, strict=True))
        variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, logs, strict=True))
        common_sd.append(tokens[-1] * math.sqrt(variance))
    slopes = tuple(tuple(t * slope for slope in row) for t, row in zip(tokens, relative, strict=True))
    return tuple(tokens), tuple(common_sd), slopes, tuple(map(sum, elasticities))


def tokens_per_round(probabilities: Sequence[float], *, goes_on: bool = False) -> tuple[float, ...]:
    """Tokens a round by k, from 0, at known s_i: 1 + Σ_{i≤k} Π_{j≤i} s_j.

    With one s = α at every position this is Leviathan et al. 2023, (1 - α^(k+1)) / (1 - α). A copy that `goes_on` gives
    the tokens of the longest draft at every k, in more rounds.
    """
    through = [1.0, *accumulate(probabilities, mul)]
    if not goes_on:
        return tuple(accumulate(through))
    return tuple(sum(through) / sum(map(mul, through, _rounds(probabilities, k))) for k in range(len(through)))


def _rounds(probabilities: Sequence[float], k: int) -> list[float]:
    """By n from 0, rounds at k that begin where a copy has held for n tokens; of the last one, its part up to there."""
    num = len(probabilities) + 1
    rounds = [float(n % (k + 1) == 0) for n in range(num)]
    rounds[-1] -= probabilities[-1] * (-num % (k + 1)) / (k + 1)
    return rounds


def _elasticities(profile: Profile) -> tuple[Floats, ...]:
    """At each k, ∂ln N/∂logit s_i by position: ∂Π_{j≤n} s_j / ∂logit s_i = (1 - s_i) · Π for n ≥ i."""
    s = profile.probabilities()
    through, rows = [1.0, *accumulate(s, mul)], []
    for k in range(len(through)):
        tokens, rounds = through[: k + 1], [1.0]
        if profile.goes_on:
            tokens, rounds = through, [*map(mul, through, _rounds(s, k))]
        tails = ([*accumulate(reversed(fitted(sums, len(through))))][::-1] for sums in (tokens, rounds))
        (all_tokens, all_rounds), *later = zip(*tails, strict=True)
        rows.append(tuple((1 - x) * (t / all_tokens - r / all_rounds) for x, (t, r) in zip(s, later, strict=True)))
    return tuple(rows)
