"""From evidence to posteriors, borrowing strength.

A posterior is handed down pair (all tasks) → task → sampling bucket → form → prompt bucket → segment. At every step it
widens by the standard deviation between such groups, and evidence of siblings counts the less, the more siblings
differ. These standard deviations are learned from the groups (empirical Bayes; method of moments of DerSimonian and
Laird 1986) with a prior worth a few groups. Jobs are not split by segment until the difference between segments is
beyond chance.

`Posteriors` infers each one once, until enough evidence was added or some time has passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import ClassVar, Final, NamedTuple

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import (
    EvidenceSource,
    EvidenceSums,
    KeyEvidence,
    Place,
    current,
    design_effect,
    effective,
    together,
)
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.posterior import ASSUMED_JOBS, JOB_INFORMATION, Counts, Posterior, Profile, clamped, total

#: Acceptance of a draft model that no task has used; standard deviation (logits) between tasks before any were
#: compared.
_PRIOR_ALPHA: Final = 0.5
_PRIOR_SPREAD: Final = 1.0
#: Standard deviation (logits) between siblings before any was compared.
_LEVELS: Final = (
    ("sampling_bucket", 0.5),
    ("form_bucket", 0.5),
    ("prompt_bucket", 0.25),
    ("segment", 0.5),
)
#: Most tasks have no segments and one form: where no other was seen, nothing is doubted for it.
_USUALLY_ONE: Final = ("form_bucket", "segment")
#: Weight of the prior spread in an estimated spread, in groups.
_PRIOR_GROUPS: Final = 2.0
#: Weight of the parent in a reach, in chances. Only costs depend on a reach.
_REACH_CHANCES: Final = 20.0


@dataclass(frozen=True, slots=True)
class PairPosterior:
    """The posterior of a drafter for this target over all tasks: the prior of each task."""

    profile: Profile
    spread: float  #: standard deviation between tasks, logits
    reach: tuple[float, ...]
    offered: tuple[float, ...] = ()  #: as a posterior's; empty: as `reach`

    @classmethod
    def unknown(
        cls,
        max_draft_tokens: int,
        acceptance: float = _PRIOR_ALPHA,
        spread: float = _PRIOR_SPREAD,
        offers: Sequence[float] = (),
        through: Sequence[float] = (),
    ) -> PairPosterior:
        """The prior of a pair without evidence. `offers` and `through` as a `DrafterState`'s: copies alone have one."""
        expected = _lasting(through or (acceptance,), max_draft_tokens)
        offered = _lasting(offers, max_draft_tokens)
        # An accepted token was proposed, so a proposal is at least as likely as its acceptance.
        reach = tuple(map(max, offered, expected))
        return cls(Profile.around(expected, 0.5 * spread, goes_on=bool(through)), spread, reach, offered)

    def for_a_task(self) -> Posterior:
        """The posterior for a task without evidence."""
        return Posterior(
            self.profile.widened(self.spread), self.reach, jobs=0.0, design_effect=1.0, offered=self.offered
        )

    def with_tasks(self, tasks: Iterable[EvidenceSums]) -> PairPosterior:
        """After the sums of each task. Their number may be cut to the latest few hundred; order does not matter."""
        sums = [task for task in tasks if task.jobs > 0]
        if not sums:
            return self
        groups = [effective(task, design_effect([task])) for task in sums]
        between = _spread(self.profile, groups, self.spread)
        pooled = self.profile.updated(_pooled(self.profile, groups, between))
        reach, offered = self.reach, self.offered
        for task in sums:
            reach, offered = _reach(task, reach), _offered(task, offered)
        return PairPosterior(pooled, between, reach, offered)

    @classmethod
    def of_drafter(cls, drafter: DrafterState, tasks: Iterable[EvidenceSums] = ()) -> PairPosterior:
        """The posterior of `drafter` from the sums of each task; without any, the prior."""
        prior = cls.unknown(drafter.max_draft_tokens, offers=drafter.offers, through=drafter.through)
        return prior.with_tasks(tasks)


def infer(
    leaves: Mapping[EvidenceKey, KeyEvidence],
    wanted: EvidenceKey,
    max_draft_tokens: int,
    pair: PairPosterior,
    error: ExpectationError = NO_ERROR,
) -> Posterior:
    """The posterior for `wanted`.

    `leaves` are the evidence of one drafter revision in one task, faded to one moment; keys of other drafters or tasks
    must not be among them. Without evidence, it is the pair's posterior, widened for one task.
    """
    sums, kept = current(leaves)
    deff = design_effect(sums.values())
    counts = {key: effective(leaf, deff) for key, leaf in sums.items()}
    profile, within = pair.profile.widened(pair.spread), dict(counts)
    for level, prior_spread in _LEVELS:
        name_of = attrgetter(level)
        groups: dict[str, list[Counts]] = {}
        for key, seen in within.items():
            groups.setdefault(name_of(key), []).append(seen)
        totals = {name: total(members) for name, members in groups.items()}
        mine = name_of(wanted)
        if level in _USUALLY_ONE and totals.keys() <= {mine}:
            prior_spread = 0.0
        spread = _spread(profile, list(totals.values()), prior_spread)
        siblings = [total for name, total in totals.items() if name != mine]
        profile = profile.updated(_pooled(profile, siblings, spread)).widened(spread)
        within = {key: seen for key, seen in within.items() if name_of(key) == mine}
    profile = profile.updated(total(within.values()))
    reach, offered = pair.reach, pair.offered or pair.reach
    for near in (False, True):
        for key in sorted(sums, key=lambda key: key == wanted):
            if (key in within) == near:
                reach, offered = _reach(sums[key], reach), _offered(sums[key], offered)
    jobs = sum(leaf.jobs for leaf in sums.values())
    jobs_w2 = sum(leaf.jobs_w2 for leaf in sums.values())
    num_jobs = jobs**2 / jobs_w2 if jobs_w2 > 0 else 0.0
    num_texts, num_tokens = (sum(map(attrgetter(name), sums.values())) for name in ("texts", "output_tokens"))
    information = sum(_information(profile, seen) for seen in counts.values())
    return Posterior(
        _sized(profile, max_draft_tokens),
        _lasting(reach, max_draft_tokens),
        jobs=num_jobs,
        design_effect=deff,
        kept=kept,
        offered=_lasting(offered, max_draft_tokens),
        error=error,
        job_information=(ASSUMED_JOBS * JOB_INFORMATION + information) / (ASSUMED_JOBS + num_jobs),
        text_tokens=num_tokens / num_texts if num_texts > 0 else 0.0,
    )


def splits_by_segment(leaves: Mapping[EvidenceKey, KeyEvidence]) -> bool:
    """Whether segments of one task differ in acceptance beyond chance, so that they are decided apart."""
    sums, _ = current(leaves)
    deff = design_effect(sums.values())
    groups: dict[str, list[Counts]] = {}
    for key, leaf in sums.items():
        groups.setdefault(key.segment, []).append(effective(leaf, deff))
    totals = [total(members) for members in groups.values()]
    positions = max((len(total.chances) for total in totals), default=0)
    return _spread(Profile.around((0.5,) * positions, 1.0), totals, 0.0) > 0


def _pooled(profile: Profile, groups: Sequence[Counts], spread: float) -> Counts:
    """The evidence of groups that differ by `spread` about their common centre: each counts at most 1/spread²."""
    return total(group.scaled(1 / (1 + _information(profile, group) * spread**2)) for group in groups)


def _spread(profile: Profile, groups: Sequence[Counts], prior: float) -> float:
    """Standard deviation between groups (logits); without a prior, 0 unless it is beyond chance at 95 %."""
    groups = [group for group in groups if any(group.chances)]
    if len(groups) < 2:
        return prior
    centre = profile.updated(total(groups)).probabilities()
    shifts, weights = [], []
    for group in groups:
        h = sum(n * p * (1 - p) for n, p in zip(group.chances, centre, strict=False))
        score = sum(a - n * p for a, n, p in zip(group.accepts, group.chances, centre, strict=False))
        if h > 0:
            shifts.append(clamped(score / h))
            weights.append(h)
    if len(shifts) < 2:
        return prior
    weight, degrees = sum(weights), len(shifts) - 1
    mean = sum(w * d for w, d in zip(weights, shifts, strict=True)) / weight
    q = sum(w * (d - mean) ** 2 for w, d in zip(weights, shifts, strict=True))
    scale = weight - sum(w * w for w in weights) / weight
    seen = max(0.0, q - degrees) / scale if scale > 0 else 0.0
    if prior == 0:
        # χ² at 95 % by Wilson and Hilferty 1931.
        beyond_chance = degrees * (1 - 2 / (9 * degrees) + 1.645 * math.sqrt(2 / (9 * degrees))) ** 3
        return math.sqrt(seen) if q > beyond_chance else 0.0
    return math.sqrt((_PRIOR_GROUPS * prior**2 + degrees * seen) / (_PRIOR_GROUPS + degrees))


def _information(profile: Profile, counts: Counts) -> float:
    return sum(n * p * (1 - p) for n, p in zip(counts.chances, profile.probabilities(), strict=False))


def _reach(sums: EvidenceSums, parent: Sequence[float]) -> tuple[float, ...]:
    reach: list[float] = []
    for i in range(max(len(parent), len(sums.chances))):
        expected = parent[i] if i < len(parent) else reach[-1] if reach else 1.0
        trials, chances = (sums.trials[i], sums.chances[i]) if i < len(sums.chances) else (0.0, 0.0)
        reach.append(min(1.0, (trials + _REACH_CHANCES * expected) / (chances + _REACH_CHANCES)))
    return tuple(reach)


def _offered(sums: EvidenceSums, parent: Sequence[float]) -> tuple[float, ...]:
    """How often a token is proposed after those proposed before it.

    Evidence holds how many accepted drafts ended at k (`chances`), not how many proposals did. The share is assumed
    to be the same for proposals.
    """
    offered: list[float] = []
    for i in range(max(len(parent), len(sums.chances))):
        expected = parent[i] if i < len(parent) else offered[-1] if offered else 1.0
        proposed, allowed = (sums.proposed[i], sums.chances[i]) if i < len(sums.chances) else (0.0, 0.0)
        if i and allowed:
            through = sums.accepts[i - 1]
            allowed = sums.proposed[i - 1] * (min(1.0, allowed / through) if through > 0 else 1.0)
        if i and not allowed:
            expected = min(expected, offered[-1])  # no longer draft was ever allowed: it ends as at the position before
        offered.append(min(1.0, (proposed + _REACH_CHANCES * expected) / (allowed + _REACH_CHANCES)))
    return tuple(offered)


def _lasting(values: Sequence[float], size: int) -> tuple[float, ...]:
    """`size` values, the last one repeated where there are fewer."""
    last = values[-1] if values else 1.0
    return (*values, *(last,) * size)[:size]


def _sized(profile: Profile, size: int) -> Profile:
    mean, own_var, loading = (_lasting(row, size) for row in (profile.mean, profile.own_var, profile.loading))
    return Profile(mean, profile.common_var, own_var, loading, profile.goes_on)


#: A posterior is inferred again after this share of new jobs, or this long, because inference takes a millisecond and
#: hundreds of jobs end in a second.
_NEWS_SHARE: Final = 0.02
_NEWS_WAITS: Final = timedelta(seconds=1)
_MAX_HELD: Final = 10_000
#: The leaves of a place stand at one moment, or, where clocks differ, at moments close to each other.
_NO_FADING: Final = timedelta(days=3650)


class Inferred(NamedTuple):
    """A posterior, and the evidence that it comes from."""

    posterior: Posterior
    seen: EvidenceSums  #: of the whole task
    alike: float  #: weighted jobs of those with the same key


@dataclass(frozen=True, slots=True)
class _Held:
    version: int
    at: datetime
    inferred: Inferred


@dataclass(eq=False)
class Posteriors:
    """Posteriors of drafters, from `evidence`.

    A posterior stays for `LASTS` while no evidence is added: only fading moves it. The posterior of a drafter over all
    tasks stays as long, whatever is added: it moves slowly, and to add up the tasks takes tens of milliseconds.
    """

    LASTS: ClassVar[timedelta] = timedelta(seconds=60)

    evidence: EvidenceSource
    _held: dict[tuple[EvidenceKey, int], _Held] = field(default_factory=dict, init=False)
    _pairs: dict[tuple[str, str, int], tuple[datetime, PairPosterior]] = field(default_factory=dict, init=False)
    _splits: dict[Place, tuple[int, bool]] = field(default_factory=dict, init=False)

    def inferred(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Inferred:
        """The posterior of `drafter` for `wanted`, whose own drafter is ignored, and its evidence."""
        place = Place(wanted.task, drafter.name, drafter.revision)
        key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
        version = self.evidence.version(place)
        held = self._held.get((key, drafter.max_draft_tokens))
        if held is not None and not self._is_due(held, version, now):
            return held.inferred
        standing, pair = self.evidence.standing(place, now), self.pair(drafter, now)
        if len(self._held) >= _MAX_HELD:
            self._held.clear()
        posterior = infer(standing.leaves, key, drafter.max_draft_tokens, pair, standing.error)
        alike = standing.leaves[key].all.jobs if key in standing.leaves else 0.0
        inferred = Inferred(posterior, seen_in(standing.leaves, now), alike)
        self._held[key, drafter.max_draft_tokens] = _Held(version, now, inferred)
        return inferred

    def pair(self, drafter: DrafterState, now: datetime) -> PairPosterior:
        """The posterior of the drafter over all tasks."""
        name = drafter.name, drafter.revision, drafter.max_draft_tokens
        held = self._pairs.get(name)
        if held is not None and timedelta(0) <= now - held[0] < self.LASTS:
            return held[1]
        pair = PairPosterior.of_drafter(drafter, self.evidence.of_tasks(drafter, now))
        self._pairs[name] = now, pair
        return pair

    def splits_by_segment(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> bool:
        """Whether the task's segments differ in acceptance beyond chance for one of the drafters."""
        return any(self._splits_of(Place(task, drafter.name, drafter.revision), now) for drafter in drafters)

    def _splits_of(self, place: Place, now: datetime) -> bool:
        version = self.evidence.version(place)
        known = self._splits.get(place)
        if known is None or known[0] != version:
            known = self._splits[place] = version, splits_by_segment(self.evidence.standing(place, now).leaves)
        return known[1]

    def _is_due(self, held: _Held, version: int, now: datetime) -> bool:
        age, num_new = now - held.at, version - held.version
        if not timedelta(0) <= age < self.LASTS:
            return True
        return num_new != 0 and (num_new >= _NEWS_SHARE * held.inferred.posterior.jobs or age >= _NEWS_WAITS)


def seen_in(leaves: Mapping[EvidenceKey, KeyEvidence], now: datetime) -> EvidenceSums:
    """What was counted under all these keys, which were faded to one moment, `now` or later, each."""
    sums = [evidence.all for evidence in leaves.values()]
    return together(sums, _NO_FADING) if sums else EvidenceSums(now)
