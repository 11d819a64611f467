"""Sums over the jobs of an evidence key. The sums fade. Their size does not grow with the history.

Every sum gives a job the weight w, which halves every half-life of its age. First-order sums (Σ w·x) fade by f,
second-order sums (Σ w²·x·y, names ending in `_w2`) by f². The unit of variance is the job, not the token, because
acceptance is correlated inside a text. So the second-order sums hold squares and products of whole jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import starmap, zip_longest
from operator import add, attrgetter, mul
from typing import Any, Final

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.errors import AlphaloopError


class InconsistentEvidence(AlphaloopError, ValueError):
    """An addition of sums of different moments, or a subtraction of more than the sums hold."""

    code = "inconsistent_evidence"


@dataclass(frozen=True, slots=True)
class EvidenceSums:
    """Faded sums over jobs of one key, all at the same moment. Tuples hold one number a draft position, from the first.

    Each job's prefill, one round with one token, is left out of `rounds` and `tokens`.
    """

    as_of: datetime
    jobs: float = 0.0  #: Σ w
    jobs_w2: float = 0.0  #: Σ w²
    rounds: float = 0.0
    offered: float = 0.0  #: rounds with a proposal
    tokens: float = 0.0  #: of the rounds
    output_tokens: float = 0.0  #: Σ w·t over jobs of t tokens
    output_tokens_sq: float = 0.0  #: Σ w·t²: first order, so that mean and spread of a job's length follow
    prompt_tokens: float = 0.0  #: Σ w·p over jobs with prompts of p tokens
    #: Σ w over jobs whose lengths are in these sums: those of other rows of the same job would count them twice.
    texts: float = 0.0
    ends: float = 0.0  #: Σ w over texts that ended by themselves: a limit cut the others, which would have been longer
    proposed: tuple[float, ...] = ()
    chances: tuple[float, ...] = ()  #: rounds in which i could have been proposed: accepted through i - 1, at k ≥ i
    trials: tuple[float, ...] = ()
    accepts: tuple[float, ...] = ()
    trials_w2: tuple[float, ...] = ()  #: Σ w²·n²
    accepts_w2: tuple[float, ...] = ()  #: Σ w²·a²
    accepts_trials_w2: tuple[float, ...] = ()  #: Σ w²·a·n
    chances_w2: tuple[float, ...] = ()  #: Σ w²·c²
    accepts_chances_w2: tuple[float, ...] = ()  #: Σ w²·a·c

    @classmethod
    def of_job(
        cls,
        counts: AcceptanceCounts,
        num_draft_tokens: int,
        decoded_at: datetime,
        num_tokens: int,
        num_prompt_tokens: int = 0,
        chances: Sequence[int] | None = None,
        *,
        is_cut: bool = False,
    ) -> EvidenceSums:
        """One job decoded at draft length k = `num_draft_tokens`, its `num_tokens` with the prefill's one.

        `is_cut`: a limit ended the text, which is at least so long.

        `chances` by position says in how many rounds the draft length allowed each, where it changed within the job;
        without it, it was the same in every round.
        """
        rounds = max(counts.rounds - 1, 0)
        if not (counts.trials or chances or (num_draft_tokens and rounds)):  # vanilla: no position has a count
            return cls(
                decoded_at,
                1.0,
                1.0,
                float(rounds),
                float(counts.rounds - counts.num_empty_rounds),
                float(max(num_tokens - 1, 0)),
                float(num_tokens),
                float(num_tokens**2),
                float(num_prompt_tokens),
                1.0,
                0.0 if is_cut else 1.0,
            )
        through = (rounds, *counts.accepts)
        usual = through[: min(num_draft_tokens, len(counts.trials) + 1)] if rounds else ()
        allowed = _padded(usual if chances is None else chances, len(counts.trials))
        trials, accepts = _padded(counts.trials, len(allowed)), _padded(counts.accepts, len(allowed))
        # A job whose prefill was censored has no round to compare a trial with.
        given = [max(c, n) for c, n in zip(allowed, trials, strict=True)]
        return cls(
            as_of=decoded_at,
            jobs=1.0,
            jobs_w2=1.0,
            rounds=float(rounds),
            offered=float(counts.rounds - counts.num_empty_rounds),
            tokens=float(max(num_tokens - 1, 0)),
            output_tokens=float(num_tokens),
            output_tokens_sq=float(num_tokens**2),
            prompt_tokens=float(num_prompt_tokens),
            texts=1.0,
            ends=0.0 if is_cut else 1.0,
            proposed=_padded(counts.proposed, len(given)),
            chances=tuple(given),
            trials=trials,
            accepts=accepts,
            trials_w2=tuple(n * n for n in trials),
            accepts_w2=tuple(a * a for a in accepts),
            accepts_trials_w2=tuple(a * n for a, n in zip(accepts, trials, strict=True)),
            chances_w2=tuple(c * c for c in given),
            accepts_chances_w2=tuple(a * c for a, c in zip(accepts, given, strict=True)),
        )

    def faded(self, now: datetime, half_life: timedelta) -> EvidenceSums:
        """The same jobs, weighted as of `now`. Fading twice is fading once: faded(t1).faded(t2) equals faded(t2)."""
        return self.scaled(0.5 ** ((now - self.as_of) / half_life), as_of=now)

    def scaled(self, factor: float, *, as_of: datetime | None = None) -> EvidenceSums:
        """Every job's weight times `factor` ≥ 0."""
        if factor == 1.0 and as_of in (None, self.as_of):
            return self
        factors = (factor, factor**2)
        return EvidenceSums(
            as_of or self.as_of,
            *(_times(sums, factors[order]) for sums, order in zip(_values_of(self), _ORDERS, strict=True)),
        )

    def __add__(self, other: EvidenceSums) -> EvidenceSums:
        """The sums over both sets of jobs. Raises InconsistentEvidence unless both have the same `as_of`."""
        if self.as_of != other.as_of:
            raise InconsistentEvidence(
                f"expected sums of the same moment, found {self.as_of.isoformat()} and {other.as_of.isoformat()}",
                hint="fade both to one moment",
            )
        return EvidenceSums(self.as_of, *map(_plus, _values_of(self), _values_of(other)))

    def __sub__(self, other: EvidenceSums) -> EvidenceSums:
        """The sums without `other`, whose jobs are all part of these sums, with no larger weight.

        Of second-order sums it is an upper bound, since (v - w)² ≤ v² - w² where w ≤ v. Rounding never goes below 0.
        """
        if self.as_of != other.as_of or other.jobs > self.jobs * (1 + 1e-6) + 1e-9:
            raise InconsistentEvidence(
                f"expected to take away part of {self.jobs:.3f} jobs as of {self.as_of.isoformat()}, "
                f"found {other.jobs:.3f} as of {other.as_of.isoformat()}"
            )
        return EvidenceSums(self.as_of, *map(_minus, _values_of(self), _values_of(other)))

    @property
    def effective_jobs(self) -> float:
        """Number of equally weighted jobs with the same variance: (Σ w)² / Σ w² (Kish 1965). 0 without any."""
        return self.jobs**2 / self.jobs_w2 if self.jobs_w2 > 0 else 0.0


#: Names of the sums, in order.
SUMS: Final = tuple(field.name for field in fields(EvidenceSums) if field.name != "as_of")
#: Those that fade by the square of the factor.
SECOND_ORDER: Final = frozenset(name for name in SUMS if name.endswith("_w2"))


#: 1 for sums of second order, in the order of `SUMS`.
_ORDERS: Final = tuple(int(name in SECOND_ORDER) for name in SUMS)
_values_of: Final = attrgetter(*SUMS)


def together(jobs: Sequence[EvidenceSums], half_life: timedelta) -> EvidenceSums:
    """The sums of several jobs, as of the last of them.

    Sum by sum over all jobs, because adding up whole jobs two by two takes ten times as long.
    """
    until = max(job.as_of for job in jobs)
    weights = [0.5 ** ((until - job.as_of) / half_life) if job.as_of != until else 1.0 for job in jobs]
    squares = [weight * weight for weight in weights]
    sums: dict[str, Any] = {}
    for name, values in zip(SUMS, zip(*map(_values_of, jobs), strict=True), strict=True):
        factors = squares if name in SECOND_ORDER else weights
        if isinstance(values[0], tuple):
            by_position = zip_longest(*values, fillvalue=0.0)
            sums[name] = tuple(sum(map(mul, factors, position)) for position in by_position)
        else:
            sums[name] = sum(map(mul, factors, values))
    return EvidenceSums(until, **sums)


def _times(value: Any, factor: float) -> Any:
    return tuple([v * factor for v in value]) if isinstance(value, tuple) else value * factor


def _plus(left: Any, right: Any) -> Any:
    if not isinstance(left, tuple):
        return left + right
    if len(left) == len(right):
        return tuple(map(add, left, right))
    return tuple(starmap(add, zip_longest(left, right, fillvalue=0.0)))


def _minus(left: Any, right: Any) -> Any:
    if not isinstance(left, tuple):
        return max(0.0, left - right)
    return tuple([max(0.0, a - b) for a, b in zip_longest(left, right, fillvalue=0.0)])


def _padded(values: Sequence[float], length: int) -> tuple[float, ...]:
    return (*map(float, values), *(0.0,) * max(0, length - len(values)))
