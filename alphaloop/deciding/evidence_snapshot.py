"""All that is remembered under one target and one engine, and what is believed from it: for who looks back.

A worker keeps a cache that follows what others add (worker/deciding/evidence_cache.py). A snapshot is of one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final, NamedTuple

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior

#: What all tasks say moves slowly, and those of late are enough. A worker looks again every minute; days of history
#: would take minutes for it.
_PAIR_LASTS: Final = timedelta(minutes=10)
_MAX_TASKS: Final = 300


class Place(NamedTuple):
    """One drafter revision in one task; both names empty are vanilla decoding."""

    task: str
    drafter: str = ""
    draft_revision: str = ""


@dataclass(frozen=True, slots=True)
class JobLengths:
    """Of a task's jobs, as they weigh; means are None without jobs."""

    jobs: float
    output_tokens: float | None
    prompt_tokens: float | None


class EvidenceSnapshot:
    """Memories by key. `half_life` is that of their fading."""

    def __init__(self, half_life: timedelta, evidence_by_key: Mapping[EvidenceKey, KeyEvidence] | None = None) -> None:
        self.half_life: Final = half_life
        self._held: dict[Place, dict[EvidenceKey, KeyEvidence]] = {}
        self._pairs: dict[tuple[str, str], tuple[datetime, PairPosterior]] = {}
        for key, evidence in (evidence_by_key or {}).items():
            self._held.setdefault(_place(key), {})[key] = evidence

    def add(self, key: EvidenceKey, job: EvidenceSums) -> None:
        """Count a job, or several added up, under `key`."""
        held = self._held.setdefault(_place(key), {})
        held[key] = (held.get(key) or KeyEvidence.empty(job.as_of)).with_job(job, self.half_life)

    def knows(self, place: Place) -> bool:
        """Whether anything is remembered there."""
        return place in self._held

    def segments(self, task: str) -> set[str]:
        """Segments of the task of which anything is remembered; the empty one are jobs without."""
        return {key.segment for place, held in self._held.items() if place.task == task for key in held}

    def leaves(self, place: Place, now: datetime) -> dict[EvidenceKey, KeyEvidence]:
        """What is remembered there, by key, as of `now`."""
        held = self._held.get(place, {})
        return {key: evidence.faded(max(now, evidence.all.as_of), self.half_life) for key, evidence in held.items()}

    def posterior(self, wanted: EvidenceKey, drafter: DrafterState, now: datetime, limits: PolicyLimits) -> Posterior:
        """What is believed of `drafter` for `wanted` (whose own drafter is not looked at), as a worker believes it."""
        key = replace(wanted, drafter=drafter.name, draft_revision=drafter.revision)
        pair = self.pair(drafter, now, limits)
        leaves = self.leaves(Place(wanted.task, drafter.name, drafter.revision), now)
        return infer(leaves, key, drafter.max_draft_tokens, pair)

    def pair(self, drafter: DrafterState, now: datetime, limits: PolicyLimits) -> PairPosterior:
        """What all tasks say of the drafter."""
        name = drafter.name, drafter.revision
        known = self._pairs.get(name)
        if known is None or not timedelta(0) <= now - known[0] < _PAIR_LASTS:
            pair = PairPosterior.of_drafter(drafter, limits, self._of_tasks(drafter, now))
            known = self._pairs[name] = now, pair
        return known[1]

    def lengths(
        self, task: str, drafters: Iterable[DrafterState], now: datetime, sampling_bucket: str | None = None
    ) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters; of one sampling bucket, or all."""
        jobs = output = prompt = 0.0
        for place in (Place(task), *(Place(task, drafter.name, drafter.revision) for drafter in drafters)):
            for key, evidence in self._held.get(place, {}).items():
                if sampling_bucket in (None, key.sampling_bucket):
                    sums = evidence.all
                    weight = 0.5 ** (max(now - sums.as_of, timedelta(0)) / self.half_life)
                    jobs += weight * sums.jobs
                    output += weight * sums.output_tokens
                    prompt += weight * sums.prompt_tokens
        return JobLengths(jobs, output / jobs if jobs > 0 else None, prompt / jobs if jobs > 0 else None)

    def _of_tasks(self, drafter: DrafterState, now: datetime) -> list[EvidenceSums]:
        places = [place for place in self._held if place[1:] == (drafter.name, drafter.revision)]
        latest = nlargest(_MAX_TASKS, places, key=lambda place: max(m.all.as_of for m in self._held[place].values()))
        found = []
        for place in sorted(latest):
            held = self._held[place].values()
            until = max(now, *(evidence.all.as_of for evidence in held))
            first, *others = (evidence.all.faded(until, self.half_life) for evidence in held)
            found.append(sum(others, start=first))
        return found


def _place(key: EvidenceKey) -> Place:
    return Place(key.task, key.drafter, key.draft_revision)
