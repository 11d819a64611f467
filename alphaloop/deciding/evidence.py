"""Evidence: what was counted of jobs, by key, and how it fades. Pure.

Sums over the jobs of an evidence key. The sums fade. Their size does not grow with the history.

Every sum gives a job the weight w, which halves every half-life of its age. First-order sums (Σ w·x) fade by f,
second-order sums (Σ w²·x·y, names ending in `_w2`) by f². The unit of variance is the job, not the token, because
acceptance is correlated inside a text. So the second-order sums hold squares and products of whole jobs.

The evidence of a key: all of it, and its recent window.

Two sums are kept, because it is not known how long old evidence stays valid:

* `all`: fades with time alone (`HALF_LIFE`). Precise, slow to notice a change.
* `recent`: the recent window, part of `all`. Fades faster, by half every 6 hours and by half every 16 jobs added.

    all    = all · 2^(-Δt/half_life)                  + job      (… _w2 columns: the factor squared)
    recent = recent · 2^(-Δt/6 h) · 2^(-jobs/16)      + job      (likewise)

Where the recent window contradicts older evidence beyond three standard errors, older evidence is dropped as far as
contradicted. From two standard errors on, `current` discounts older evidence while it is contradicted.

A job that ended before the row's `as_of` (two workers, two clocks) is faded to `as_of` before it is added.

The weight of counts: jobs are the unit of variance, and contradicted older evidence is discounted.

* Trials inside a job are correlated. The intraclass correlation ρ is estimated from the second-order sums (Cochran
  1977, §6.4) around a prior, and counts are divided by the design effect 1 + (m - 1)·ρ at m chances a job (Kish 1965).
* Older evidence that the recent window contradicts is cut to the information that a change of that size would leave:
  a power prior (Ibrahim and Chen 2000), its power taken from the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from heapq import nlargest
from itertools import starmap, zip_longest
from operator import add, attrgetter, mul
from typing import Any, Final, NamedTuple, Protocol

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError, ExpectationErrors
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.posterior import Counts
from alphaloop.errors import AlphaloopError

#: Age at which a job counts half.
HALF_LIFE: Final = timedelta(days=3)


class InconsistentEvidence(AlphaloopError, ValueError):
    """An addition of sums of different moments, or a subtraction of more than the sums hold."""


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
    tokens: float = 0.0  #: of the rounds; forced ones are no round's yield, because they come in every mode
    output_tokens: float = 0.0  #: Σ w·t over jobs of t tokens, forced ones left out: what rounds have to yield
    prompt_tokens: float = 0.0  #: Σ w·p over jobs with prompts of p tokens
    #: Σ w over jobs whose lengths are in these sums: those of other rows of the same job would count them twice.
    texts: float = 0.0
    ends: float = 0.0  #: Σ w over texts that ended by themselves: a limit cut the others, which would have been longer
    proposed: tuple[float, ...] = ()
    chances: tuple[float, ...] = ()  #: rounds in which i could have been proposed: accepted through i - 1, at k ≥ i
    trials: tuple[float, ...] = ()
    accepts: tuple[float, ...] = ()
    accepts_w2: tuple[float, ...] = ()  #: Σ w²·a²
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

        Forced tokens count neither as the yield of rounds nor for the length that is to be decoded.

        `is_cut`: a limit ended the text, which is at least so long.

        `chances` by position says in how many rounds the draft length allowed each, where it changed within the job;
        without it, it was the same in every round.
        """
        rounds, num_tokens = max(counts.rounds - 1, 0), num_tokens - counts.num_forced
        through = (rounds, *counts.accepts)
        usual = through[: min(num_draft_tokens, len(counts.trials) + 1)] if rounds else ()
        allowed = _padded(usual if chances is None else chances, len(counts.trials))
        trials, accepts = _padded(counts.trials, len(allowed)), _padded(counts.accepts, len(allowed))
        # A job whose prefill was censored has no round to compare a trial with.
        chances_of = tuple(max(c, n) for c, n in zip(allowed, trials, strict=True))
        return cls(
            as_of=decoded_at,
            jobs=1.0,
            jobs_w2=1.0,
            rounds=float(rounds),
            offered=float(counts.rounds - counts.num_empty_rounds),
            tokens=float(max(num_tokens - 1, 0)),
            output_tokens=float(num_tokens),
            prompt_tokens=float(num_prompt_tokens),
            texts=1.0,
            ends=0.0 if is_cut else 1.0,
            proposed=_padded(counts.proposed, len(chances_of)),
            chances=chances_of,
            trials=trials,
            accepts=accepts,
            accepts_w2=tuple(a * a for a in accepts),
            chances_w2=tuple(c * c for c in chances_of),
            accepts_chances_w2=tuple(a * c for a, c in zip(accepts, chances_of, strict=True)),
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

        Second-order sums are an upper bound, since (v - w)² ≤ v² - w² where w ≤ v. Rounding never goes below 0.
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
#: 1 for sums of second order, which fade by the square of the factor, in the order of `SUMS`.
_ORDERS: Final = tuple(int(name.endswith("_w2")) for name in SUMS)
_values_of: Final = attrgetter(*SUMS)


def together(jobs: Sequence[EvidenceSums], half_life: timedelta) -> EvidenceSums:
    """The sums of several jobs, as of the last of them.

    Sum by sum over all jobs, because adding up whole jobs two by two takes ten times as long.
    """
    until = max(job.as_of for job in jobs)
    weights = [0.5 ** ((until - job.as_of) / half_life) if job.as_of != until else 1.0 for job in jobs]
    by_order = weights, [weight * weight for weight in weights]
    sums: list[Any] = []
    for order, values in zip(_ORDERS, zip(*map(_values_of, jobs), strict=True), strict=True):
        factors = by_order[order]
        if isinstance(values[0], tuple):
            by_position = zip_longest(*values, fillvalue=0.0)
            sums.append(tuple(sum(map(mul, factors, position)) for position in by_position))
        else:
            sums.append(sum(map(mul, factors, values)))
    return EvidenceSums(until, *sums)


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


#: Prior intraclass correlation of jobs, and the weight of that prior in jobs.
_PRIOR_CORRELATION: Final = 0.05
_PRIOR_CORRELATION_JOBS: Final = 8.0


def kept_of_older(leaves: Iterable[tuple[EvidenceSums, EvidenceSums]], deff: float, z: float) -> float:
    """The share of older evidence that the recent window leaves; each leaf (recent, all) is compared within itself.

    So a new mix of leaves is no contradiction. With d the difference in logits and v its variance, older evidence of
    information H keeps 1 / (1 + H · max(0, d² - z²·v)).
    """
    score = information = before = 0.0
    for recent, everything in leaves:
        jobs, jobs_w2 = everything.jobs - recent.jobs, everything.jobs_w2 - recent.jobs_w2
        if jobs <= 1e-9 or jobs_w2 <= 1e-12 or recent.jobs <= 0:
            continue
        newer = recent.effective_jobs / recent.jobs / deff
        older = jobs / jobs_w2 / deff
        counts = zip(recent.accepts, recent.chances, everything.accepts, everything.chances, strict=False)
        for a, n, x, m in counts:
            m -= n
            if n <= 0 or m <= 1e-9:
                continue
            rate = ((x - a) * older + 0.5) / (m * older + 1.0)
            score += newer * (a - n * rate)
            information += newer * n * rate * (1 - rate)
            before += older * m * rate * (1 - rate)
    if information <= 0 or before <= 0:
        return 1.0
    # Beyond 1.5 logits the linear step overshoots; older evidence is dropped there in any case.
    excess = (score / information) ** 2 - z**2 * (1 / information + 1 / before)
    return 1 / (1 + before * max(0.0, excess))


def design_effect(leaves: Iterable[EvidenceSums]) -> float:
    """The factor by which differences between jobs inflate the variance; each leaf is compared within itself.

    Residuals are taken by position, so that a different k adds no variance: the residuals Σ w²(a - s·c)² exceed the
    binomial Σ w²·c·s(1 - s) by (m_i - 1)·ρ at m_i chances a job.
    """
    beyond = binomial = weight = chances = chances_w2 = 0.0
    for leaf in leaves:
        jobs = leaf.effective_jobs
        fade = leaf.jobs_w2 / leaf.jobs if leaf.jobs > 0 else 0.0
        chances += sum(leaf.chances) * fade
        # Σ w²·C² with C = Σ_i c_i of a job, taking a job's chances to fall with i as they do on the whole.
        total = sum(map(math.sqrt, leaf.chances_w2))
        chances_w2 += total * total
        if jobs < 1.5:
            continue
        for a, c, aa, cc, ac in zip(
            leaf.accepts, leaf.chances, leaf.accepts_w2, leaf.chances_w2, leaf.accepts_chances_w2, strict=True
        ):
            if c <= 0:
                continue
            s = a / c
            expected = c * fade * s * (1 - s)
            if expected <= 0:
                continue
            residual = max(0.0, aa - 2 * s * ac + s * s * cc) * jobs / (jobs - 1)
            beyond += residual - expected
            binomial += expected * max(0.0, cc / (c * fade) - 1)
        weight += jobs - 1
    seen = beyond / binomial if binomial > 0 else 0.0
    correlation = (_PRIOR_CORRELATION_JOBS * _PRIOR_CORRELATION + weight * min(1.0, max(0.0, seen))) / (
        _PRIOR_CORRELATION_JOBS + weight
    )
    size = chances_w2 / chances if chances > 0 else 1.0
    return 1 + max(0.0, size - 1) * correlation


def effective(sums: EvidenceSums, deff: float) -> Counts:
    """Counts with the variance of independent trials: fading and the design effect taken out."""
    factor = sums.effective_jobs / sums.jobs / deff if sums.jobs > 0 else 0.0
    return Counts(tuple(a * factor for a in sums.accepts), tuple(c * factor for c in sums.chances))


#: Jobs, and time, after which `KeyEvidence.recent` weighs a job half.
RECENT_JOBS: Final = 16.0
RECENT_WINDOW: Final = timedelta(hours=6)
#: Least share of the recent window that outlives a contradiction.
_KEPT_RECENT: Final = 0.25
#: Standard errors beyond which a contradiction counts: when evidence is read, and when it is stored.
_READING_Z: Final = 2.0
_FORGETTING_Z: Final = 3.0


@dataclass(frozen=True, slots=True)
class KeyEvidence:
    """The weighted sums of a key: all jobs, and the recent window, which is part of them."""

    all: EvidenceSums
    recent: EvidenceSums

    @classmethod
    def empty(cls, as_of: datetime) -> KeyEvidence:
        """Without any job."""
        return cls(EvidenceSums(as_of), EvidenceSums(as_of))

    def with_job(self, job: EvidenceSums, half_life: timedelta) -> KeyEvidence:
        """Also this job (or several, added up), which ended at `job.as_of`."""
        now = max(self.all.as_of, job.as_of)
        job = job.faded(now, half_life)
        before = self.faded(now, half_life)
        recent = before.recent.scaled(0.5 ** (job.jobs / RECENT_JOBS))
        evidence = KeyEvidence(before.all + job, recent + job)
        kept = kept_of_older([(evidence.recent, evidence.all)], design_effect([evidence.all]), _FORGETTING_Z)
        if kept == 1:
            return evidence
        # Part of the recent window is from before the change. Left whole, it would inflate the variance between jobs.
        recent = recent.scaled(max(kept, _KEPT_RECENT)) + job
        return KeyEvidence(recent + (evidence.all - evidence.recent).scaled(kept), recent)

    def faded(self, now: datetime, half_life: timedelta) -> KeyEvidence:
        """The same at a later moment."""
        return KeyEvidence(self.all.faded(now, half_life), self.recent.faded(now, min(half_life, RECENT_WINDOW)))


def current(leaves: Mapping[EvidenceKey, KeyEvidence]) -> tuple[dict[EvidenceKey, EvidenceSums], float]:
    """Each leaf's sums, older evidence discounted where the recent window contradicts it, and the share kept."""
    deff = design_effect([evidence.all for evidence in leaves.values()])
    kept = kept_of_older([(evidence.recent, evidence.all) for evidence in leaves.values()], deff, _READING_Z)
    return {
        key: evidence.all if kept == 1 else evidence.recent + (evidence.all - evidence.recent).scaled(kept)
        for key, evidence in leaves.items()
    }, kept


class Place(NamedTuple):
    """One drafter revision in one task; both names empty are vanilla decoding."""

    task: str
    drafter: str = ""
    draft_revision: str = ""


#: Texts that weigh less, because they ended long ago, are none.
_LEAST_ENDS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class JobLengths:
    """How long a task's texts are; means are None without any."""

    jobs: float  #: weighted, each once; 0 where no text ended by itself
    output_tokens: float | None
    prompt_tokens: float | None
    limit: float | None = None  #: of a usual job, by how many texts it cut; None where it cut none

    @classmethod
    def of(cls, sums: Iterable[tuple[float, EvidenceSums]]) -> JobLengths:
        """From sums with their weights.

        A text that a limit cut is longer than what was seen of it. The mean length is estimated as with a constant
        chance of an end at each token: all tokens over the texts that ended by themselves. So a cut text never makes it
        shorter, and without cut texts it is their mean. Until one has ended, nothing is known. With that chance, texts
        of mean length n end before a limit m with probability 1 - exp(-m / n); where none has ended, they are m long.
        """
        texts = ends = output = prompt = 0.0
        for weight, evidence in sums:
            texts += weight * evidence.texts
            ends += weight * evidence.ends
            output += weight * evidence.output_tokens
            prompt += weight * evidence.prompt_tokens
        mean, share = (output / ends, ends / texts) if ends > _LEAST_ENDS else (None, 0.0)
        limit = output / texts if texts > 0 and mean is None else None
        if mean is not None and share < 1 - _LEAST_ENDS:
            limit = -mean * math.log(1 - share)
        return cls(0.0 if mean is None else texts, mean, prompt / texts if texts > 0 else None, limit)


class Standing(NamedTuple):
    """The evidence of a place at one moment."""

    leaves: Mapping[EvidenceKey, KeyEvidence]
    error: ExpectationError = NO_ERROR


class EvidenceSource(Protocol):
    """Evidence for one target and one engine."""

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""

    def standing(self, place: Place, now: datetime) -> Standing:
        """The evidence there, by key, faded to `now`."""

    def of_tasks(self, drafter: DrafterState, now: datetime) -> Sequence[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""

    def lengths(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters together."""


#: Tasks that form a drafter's posterior for a new task: the most recent ones; their number bounds the time.
MAX_TASKS: Final = 300


class EvidenceSnapshot:
    """An `EvidenceSource` in memory. Evidence fades by `half_life`. Without `errors` no expectation is corrected."""

    def __init__(
        self,
        half_life: timedelta,
        evidence_by_key: Mapping[EvidenceKey, KeyEvidence] | None = None,
        errors: ExpectationErrors | None = None,
    ) -> None:
        self.half_life: Final = half_life
        self._errors = errors
        self._held: dict[Place, dict[EvidenceKey, KeyEvidence]] = {}
        self._totals: dict[Place, EvidenceSums] = {}
        self._versions: dict[Place, int] = {}
        for key, evidence in (evidence_by_key or {}).items():
            self._held.setdefault(place_of(key), {})[key] = evidence

    def add(self, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> None:
        """Count jobs that were recorded together: those of one key are added up first, as the store does."""
        by_key: dict[EvidenceKey, list[EvidenceSums]] = {}
        for key, job in jobs:
            by_key.setdefault(key, []).append(job)
        for key, added_jobs in by_key.items():
            place, added = place_of(key), together(added_jobs, self.half_life)
            held = self._held.setdefault(place, {})
            held[key] = (held.get(key) or KeyEvidence.empty(added.as_of)).with_job(added, self.half_life)
            self.changed(place, num_jobs(added_jobs))

    def put(self, key: EvidenceKey, evidence: KeyEvidence, num_more: int) -> None:
        """Hold this evidence of a key in place of what is held; it includes `num_more` more jobs."""
        self._held.setdefault(place_of(key), {})[key] = evidence
        self.changed(place_of(key), num_more)

    def forget(self, keys: Iterable[EvidenceKey]) -> None:
        """Hold these keys no more."""
        for key in keys:
            place = place_of(key)
            del self._held[place][key]
            self._totals.pop(place, None)

    def clear(self) -> None:
        """Hold nothing."""
        self._held, self._totals = {}, {}

    def changed(self, place: Place, num_more: int) -> None:
        """Count `num_more` jobs there as new."""
        self._versions[place] = self.version(place) + num_more
        self._totals.pop(place, None)

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""
        return self._versions.get(place, 0)

    def segments(self, task: str) -> dict[str, datetime]:
        """Segments of the task of which there is evidence, and when each was used last; the empty one: without one."""
        last_used: dict[str, datetime] = {}
        for place in (place for place in self._held if place.task == task):
            for key, evidence in self._held[place].items():
                last_used[key.segment] = max(evidence.all.as_of, last_used.get(key.segment, evidence.all.as_of))
        return last_used

    def held(self, place: Place) -> Mapping[EvidenceKey, KeyEvidence]:
        """The evidence there, by key, each as of its last job."""
        return self._held.get(place, {})

    def leaves(self, place: Place, now: datetime) -> dict[EvidenceKey, KeyEvidence]:
        """The evidence there, by key, faded to `now`."""
        return {
            key: evidence.faded(max(now, evidence.all.as_of), self.half_life)
            for key, evidence in self.held(place).items()
        }

    def standing(self, place: Place, now: datetime) -> Standing:
        """As `leaves`, and how wrong expectations were."""
        error = self._errors.of(place.task, place.drafter, now) if self._errors else NO_ERROR
        return Standing(self.leaves(place, now), error)

    def of_tasks(self, drafter: DrafterState, now: datetime) -> list[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""
        places = [place for place, held in self._held.items() if held and place[1:] == (drafter.name, drafter.revision)]
        if len(places) > MAX_TASKS:
            places = nlargest(MAX_TASKS, places, key=lambda place: self._total(place).as_of)
        totals = map(self._total, sorted(places))
        return [total.faded(max(now, total.as_of), self.half_life) for total in totals]

    def lengths(
        self, task: str, drafters: Iterable[DrafterState], now: datetime, *, sampling_bucket: str | None = None
    ) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters; of one sampling bucket, or all."""
        return JobLengths.of(
            (0.5 ** (max(now - evidence.all.as_of, timedelta(0)) / self.half_life), evidence.all)
            for place in (Place(task), *(Place(task, drafter.name, drafter.revision) for drafter in drafters))
            for key, evidence in self.held(place).items()
            if sampling_bucket in (None, key.sampling_bucket)
        )

    def _total(self, place: Place) -> EvidenceSums:
        if place not in self._totals:
            self._totals[place] = together([evidence.all for evidence in self._held[place].values()], self.half_life)
        return self._totals[place]


def num_jobs(sums: Iterable[EvidenceSums]) -> int:
    """Jobs that the sums hold, at least one each."""
    return sum(max(1, round(evidence.jobs)) for evidence in sums)


def place_of(key: EvidenceKey) -> Place:
    """The place that the key's evidence belongs to."""
    return Place(key.task, key.drafter, key.draft_revision)
