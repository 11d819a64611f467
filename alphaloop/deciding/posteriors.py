"""Posteriors from evidence, each inferred once until enough evidence was added or some time has passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums, together
from alphaloop.deciding.evidence_source import EvidenceSource, Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer, splits_by_segment
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior

#: A posterior is inferred again after this share of new jobs, or this long, because inference takes a millisecond and
#: hundreds of jobs end in a second.
_NEWS_SHARE: Final = 0.02
_NEWS_WAITS: Final = timedelta(seconds=1)
#: Where no evidence was added, only fading moves a posterior.
_LASTS: Final = timedelta(seconds=60)
_MAX_HELD: Final = 10_000
#: The leaves of a place stand at one moment, or, of clocks that differ, at moments close to each other.
_NO_FADING: Final = timedelta(days=3650)


class Inferred(NamedTuple):
    """A posterior, and the evidence behind it."""

    posterior: Posterior
    seen: EvidenceSums  #: of the whole task
    alike: float  #: weighted jobs of those with the same key


@dataclass(frozen=True, slots=True)
class _Held:
    version: int
    at: datetime
    inferred: Inferred


class Posteriors:
    """Posteriors of drafters, from `evidence`.

    A posterior stays for `lasts` while no evidence is added. The posterior of a drafter over all tasks stays for
    `pair_lasts`: it moves slowly, and to add up the tasks takes tens of milliseconds.
    """

    def __init__(
        self,
        evidence: EvidenceSource,
        limits: PolicyLimits,
        *,
        lasts: timedelta = _LASTS,
        pair_lasts: timedelta = _LASTS,
    ) -> None:
        self._evidence, self._limits, self._lasts, self._pair_lasts = evidence, limits, lasts, pair_lasts
        self._held: dict[tuple[EvidenceKey, int], _Held] = {}
        self._pairs: dict[tuple[str, str, int], tuple[datetime, PairPosterior]] = {}
        self._splits: dict[Place, tuple[int, bool]] = {}

    def of(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Posterior:
        """The posterior of `drafter` for `wanted`; the drafter that `wanted` names is ignored."""
        return self.inferred(wanted, drafter, now).posterior

    def inferred(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Inferred:
        """As `of`, with the evidence behind it."""
        place = Place(wanted.task, drafter.name, drafter.revision)
        key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
        version = self._evidence.version(place)
        held = self._held.get((key, drafter.max_draft_tokens))
        if held is not None and not self._is_due(held, version, now):
            return held.inferred
        standing, pair = self._evidence.standing(place, now), self.pair(drafter, now)
        if len(self._held) >= _MAX_HELD:
            self._held.clear()
        posterior = infer(standing.leaves, key, drafter.max_draft_tokens, pair, standing.error)
        alike = standing.leaves[key].all.jobs if key in standing.leaves else 0.0
        found = Inferred(posterior, seen_in(standing.leaves, now), alike)
        self._held[key, drafter.max_draft_tokens] = _Held(version, now, found)
        return found

    def pair(self, drafter: DrafterState, now: datetime) -> PairPosterior:
        """The posterior of the drafter over all tasks."""
        name = drafter.name, drafter.revision, drafter.max_draft_tokens
        held = self._pairs.get(name)
        if held is not None and timedelta(0) <= now - held[0] < self._pair_lasts:
            return held[1]
        found = PairPosterior.of_drafter(drafter, self._limits, self._evidence.of_tasks(drafter, now))
        self._pairs[name] = now, found
        return found

    def splits_by_segment(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> bool:
        """Whether the task's segments differ in acceptance beyond chance for one of the drafters."""
        return any(self._splits_of(Place(task, drafter.name, drafter.revision), now) for drafter in drafters)

    def _splits_of(self, place: Place, now: datetime) -> bool:
        version = self._evidence.version(place)
        known = self._splits.get(place)
        if known is None or known[0] != version:
            known = self._splits[place] = version, splits_by_segment(self._evidence.standing(place, now).leaves)
        return known[1]

    def _is_due(self, held: _Held, version: int, now: datetime) -> bool:
        age, num_new = now - held.at, version - held.version
        if not timedelta(0) <= age < self._lasts:
            return True
        return num_new != 0 and (num_new >= _NEWS_SHARE * held.inferred.posterior.jobs or age >= _NEWS_WAITS)


def seen_in(leaves: Mapping[EvidenceKey, KeyEvidence], now: datetime) -> EvidenceSums:
    """What was counted under all these keys, which were faded to one moment, `now` or later, each."""
    sums = [evidence.all for evidence in leaves.values()]
    return together(sums, _NO_FADING) if sums else EvidenceSums(now)
