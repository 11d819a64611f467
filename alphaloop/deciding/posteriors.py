"""Posteriors from evidence, each inferred once until enough evidence was added or some time has passed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence_snapshot import place_of
from alphaloop.deciding.evidence_source import EvidenceSource, Place, Standing
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer, splits_by_segment
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.origins import PairOrigin, PosteriorOrigin, SplitOrigin
from alphaloop.deciding.posterior import Posterior

#: A posterior is inferred again after this share of new jobs, or this long, because inference takes a millisecond and
#: hundreds of jobs end in a second.
_NEWS_SHARE: Final = 0.02
_NEWS_WAITS: Final = timedelta(seconds=1)
#: Where no evidence was added, only fading moves a posterior.
_LASTS: Final = timedelta(seconds=60)
_MAX_HELD: Final = 10_000


class Inferred(NamedTuple):
    """A posterior and where it comes from."""

    posterior: Posterior
    origin: PosteriorOrigin


class Splits(NamedTuple):
    """Whether a task is decided by segment, and the findings that say so."""

    is_split: bool
    origins: tuple[SplitOrigin, ...]


class InferredPair(NamedTuple):
    """The posterior of a drafter over all tasks, and where it comes from."""

    pair: PairPosterior
    origin: PairOrigin


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
        self._pairs: dict[tuple[str, str, int], InferredPair] = {}
        self._splits: dict[Place, tuple[int, bool, SplitOrigin]] = {}

    def of(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Posterior:
        """The posterior of `drafter` for `wanted`; the drafter that `wanted` names is ignored."""
        return self.inferred(wanted, drafter, now).posterior

    def inferred(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime) -> Inferred:
        """The posterior of `drafter` for `wanted` with its origin, which is one object as long as it stays."""
        place = Place(wanted.task, drafter.name, drafter.revision)
        key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
        version = self._evidence.version(place)
        held = self._held.get((key, drafter.max_draft_tokens))
        if held is not None and not self._is_due(held, version, now):
            return held.inferred
        standing, pair = self._evidence.standing(place, now), self._pair(drafter, now)
        origin = PosteriorOrigin(key, now, standing.positions, pair.origin, standing.error)
        return self._hold(origin, drafter, standing, pair.pair, version)

    def restore(self, origin: PosteriorOrigin, drafter: DrafterState, standing: Standing, pair: PairPosterior) -> None:
        """Infer a posterior as it was inferred then, and hold it: to take a recorded decision again."""
        self._hold(origin, drafter, standing, pair, self._evidence.version(place_of(origin.key)))

    def _hold(
        self, origin: PosteriorOrigin, drafter: DrafterState, standing: Standing, pair: PairPosterior, version: int
    ) -> Inferred:
        if len(self._held) >= _MAX_HELD:
            self._held.clear()
        inferred = Inferred(infer(standing.leaves, origin.key, drafter.max_draft_tokens, pair, origin.error), origin)
        self._held[origin.key, drafter.max_draft_tokens] = _Held(version, origin.at, inferred)
        return inferred

    def _is_due(self, held: _Held, version: int, now: datetime) -> bool:
        age, num_new = now - held.at, version - held.version
        if not timedelta(0) <= age < self._lasts:
            return True
        return num_new != 0 and (num_new >= _NEWS_SHARE * held.inferred.posterior.jobs or age >= _NEWS_WAITS)

    def pair(self, drafter: DrafterState, now: datetime) -> PairPosterior:
        """The posterior of the drafter over all tasks."""
        return self._pair(drafter, now).pair

    def restore_pair(self, origin: PairOrigin, drafter: DrafterState, pair: PairPosterior) -> None:
        """Hold the posterior of a drafter over all tasks as it was inferred then."""
        self._pairs[_name_of(drafter)] = InferredPair(pair, origin)

    def _pair(self, drafter: DrafterState, now: datetime) -> InferredPair:
        held = self._pairs.get(_name_of(drafter))
        if held is not None and timedelta(0) <= now - held.origin.at < self._pair_lasts:
            return held
        tasks = self._evidence.of_tasks(drafter, now)
        pair = PairPosterior.of_drafter(drafter, self._limits, tasks.sums)
        found = self._pairs[_name_of(drafter)] = InferredPair(pair, PairOrigin(drafter.name, now, tasks.positions))
        return found

    def splits_by_segment(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> bool:
        """Whether the task's segments differ in acceptance beyond chance for one of the drafters."""
        return self.splits(task, drafters, now).is_split

    def splits(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> Splits:
        """As `splits_by_segment`, with the findings, which end with the first drafter whose segments differ."""
        origins: list[SplitOrigin] = []
        for drafter in drafters:
            place = Place(task, drafter.name, drafter.revision)
            version = self._evidence.version(place)
            known = self._splits.get(place)
            if known is None or known[0] != version:
                standing = self._evidence.standing(place, now)
                origin = SplitOrigin(task, drafter.name, now, standing.positions)
                known = self._hold_split(origin, place, standing, version)
            origins.append(known[2])
            if known[1]:
                return Splits(True, tuple(origins))
        return Splits(False, tuple(origins))

    def restore_split(self, origin: SplitOrigin, drafter: DrafterState, standing: Standing) -> None:
        """Find out as it was found out then, and hold the finding."""
        place = Place(origin.task, drafter.name, drafter.revision)
        self._hold_split(origin, place, standing, self._evidence.version(place))

    def _hold_split(
        self, origin: SplitOrigin, place: Place, standing: Standing, version: int
    ) -> tuple[int, bool, SplitOrigin]:
        found = self._splits[place] = version, splits_by_segment(standing.leaves), origin
        return found


def _name_of(drafter: DrafterState) -> tuple[str, str, int]:
    return drafter.name, drafter.revision, drafter.max_draft_tokens
