"""Evidence in memory, of one moment: for `explain`, `replay` and the simulator.

A worker keeps a cache that follows what other workers add (worker/deciding/evidence_cache.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums, together
from alphaloop.deciding.evidence_source import JobLengths, Place, Standing
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationErrors
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.key_evidence import KeyEvidence

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
        for key, its in by_key.items():
            place, added = place_of(key), together(its, self.half_life)
            held = self._held.setdefault(place, {})
            held[key] = (held.get(key) or KeyEvidence.empty(added.as_of)).with_job(added, self.half_life)
            self._versions[place] = self.version(place) + num_jobs(its)
            self._totals.pop(place, None)

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""
        return self._versions.get(place, 0)

    def knows(self, place: Place) -> bool:
        """Whether there is evidence there."""
        return place in self._held

    def segments(self, task: str) -> set[str]:
        """Segments of the task of which there is evidence; the empty one are jobs without a segment."""
        return {key.segment for place, held in self._held.items() if place.task == task for key in held}

    def leaves(self, place: Place, now: datetime) -> dict[EvidenceKey, KeyEvidence]:
        """The evidence there, by key, faded to `now`."""
        held = self._held.get(place, {})
        return {key: evidence.faded(max(now, evidence.all.as_of), self.half_life) for key, evidence in held.items()}

    def standing(self, place: Place, now: datetime) -> Standing:
        """As `leaves`, and how wrong expectations were."""
        error = self._errors.of(place.task, place.drafter, now) if self._errors else NO_ERROR
        return Standing(self.leaves(place, now), error)

    def of_tasks(self, drafter: DrafterState, now: datetime) -> list[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""
        places = [place for place in self._held if place[1:] == (drafter.name, drafter.revision)]
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
            for key, evidence in self._held.get(place, {}).items()
            if sampling_bucket in (None, key.sampling_bucket)
        )

    def _total(self, place: Place) -> EvidenceSums:
        if place not in self._totals:
            self._totals[place] = together([evidence.all for evidence in self._held[place].values()], self.half_life)
        return self._totals[place]


def num_jobs(sums: Iterable[EvidenceSums]) -> int:
    """Jobs that the sums hold, at least one each."""
    return sum(max(1, round(one.jobs)) for one in sums)


def place_of(key: EvidenceKey) -> Place:
    """The place that the key's evidence belongs to."""
    return Place(key.task, key.drafter, key.draft_revision)
