"""What is remembered of the tasks that this worker may serve: read once, then kept up with what everybody adds."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final, TypeAlias

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.store.acceptance_state import AcceptanceStateStore, StateRow, together
from alphaloop.store.drafts import DraftRegistry

#: Tasks that tell what a drafter is worth for a new one: those of late are enough, and their number bounds the time.
MAX_TASKS: Final = 300

#: Evidence of one drafter in one task: task, drafter.
_Place: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class JobLengths:
    """Tokens of a task's jobs; `jobs` as they weigh now."""

    jobs: float
    output_tokens: float | None  #: mean; None without jobs


@dataclass(frozen=True, slots=True)
class _Held:
    num_jobs: int
    evidence: KeyEvidence


class EvidenceCache:
    """Rows of acceptance_state for one target, one engine and the drafters here, and which of these may not serve.

    `refresh` reads what changed, from any thread; `add` counts this worker's own outcomes at once; everything else
    answers without the database.
    """

    def __init__(
        self,
        store: AcceptanceStateStore,
        registry: DraftRegistry,
        *,
        target_revision: str,
        engine: str,
        drafters: Mapping[str, str],
        half_life: timedelta,
    ) -> None:
        self._store = store
        self._registry = registry
        self._served = (target_revision, engine, dict(drafters))
        self._half_life = half_life
        self._lock = threading.RLock()
        self._seen: int | None = None
        self._stale: frozenset[tuple[str, str]] = frozenset()
        self._unread: dict[_Place, list[StateRow]] = {}  # as they came: most tasks are not asked for
        self._held: dict[_Place, dict[EvidenceKey, _Held]] = {}
        self._totals: dict[_Place, EvidenceSums] = {}
        self._versions: dict[_Place, int] = {}

    def refresh(self) -> None:
        """Read which drafts are stale, and the rows that changed since the last look; the first time, all of them.

        Raises StoreError; what is known then stays as it was.
        """
        target_revision, engine, drafters = self._served
        stale = frozenset(self._registry.stale(target_revision))
        look = self._store.look(target_revision, engine, drafters, since=self._seen)
        with self._lock:
            self._stale = stale
            if look.is_all:
                self._begin_with(look.rows)
            else:
                for row in look.rows:
                    self._take(row)
            self._seen = look.seen

    def is_stale(self, drafter: str, revision: str) -> bool:
        """Whether that draft is flagged stale, or retired."""
        return (drafter, revision) in self._stale

    def add(self, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> None:
        """Count jobs that were recorded just now, together by key, as the store did."""
        by_key: dict[EvidenceKey, list[EvidenceSums]] = {}
        for key, job in jobs:
            by_key.setdefault(key, []).append(job)
        with self._lock:
            for key, its in by_key.items():
                place = _place(key)
                held = self._open(place)
                added = together(its, self._half_life)
                before = held.get(key) or _Held(0, KeyEvidence.empty(added.as_of))
                held[key] = _Held(before.num_jobs + len(its), before.evidence.with_job(added, self._half_life))
                self._changed(place)

    def version(self, task: str, drafter: str) -> int:
        """Another number whenever anything changed about a drafter in a task."""
        return self._versions.get((task, drafter), 0)

    def leaves(self, task: str, drafter: str, now: datetime) -> dict[EvidenceKey, KeyEvidence]:
        """What is remembered of a drafter in a task, by key, as of `now`."""
        with self._lock:
            held = self._open((task, drafter)).items()
            return {key: one.evidence.faded(max(now, one.evidence.all.as_of), self._half_life) for key, one in held}

    def last_used(self, task: str, drafter: str) -> datetime | None:
        """When the task last saw the drafter at work; None if never."""
        with self._lock:
            place = (task, drafter)
            return self._last_used(place) if self._open(place) else None

    def of_tasks(self, drafter: str, now: datetime) -> list[EvidenceSums]:
        """The sums of a drafter in each task of late, as of `now`."""
        with self._lock:
            places = [place for place in self._unread.keys() | self._held.keys() if place[1] == drafter]
            if len(places) > MAX_TASKS:
                places = nlargest(MAX_TASKS, places, key=self._last_used)
            return [
                total.faded(max(now, total.as_of), self._half_life)
                for total in map(self._total, sorted(places))
                if total is not None
            ]

    def lengths(self, task: str, drafters: Iterable[str], now: datetime) -> JobLengths:
        """How long the task's jobs are, those with these drafters (the empty name is vanilla) taken together."""
        jobs = tokens = 0.0
        with self._lock:
            for drafter in drafters:
                for held in self._open((task, drafter)).values():
                    sums = held.evidence.all
                    weight = 0.5 ** ((now - sums.as_of) / self._half_life)
                    jobs += weight * sums.jobs
                    tokens += weight * sums.output_tokens
        return JobLengths(jobs, tokens / jobs if jobs > 0 else None)

    def _begin_with(self, rows: Iterable[StateRow]) -> None:
        self._unread, self._held, self._totals = {}, {}, {}
        for row in rows:
            self._unread.setdefault((row.task, row.pair.drafter), []).append(row)
        for place in self._unread.keys() | self._versions.keys():
            self._changed(place)

    def _take(self, row: StateRow) -> None:
        place = (row.task, row.pair.drafter)
        held, key = self._open(place), row.key
        # An outcome of ours may have been counted here after the row was read; the next look finds both together.
        if key in held and held[key].num_jobs > row.num_jobs:
            return
        held[key] = _Held(row.num_jobs, row.evidence)
        self._changed(place)

    def _open(self, place: _Place) -> dict[EvidenceKey, _Held]:
        if place not in self._held:
            rows = self._unread.pop(place, [])
            self._held[place] = {row.key: _Held(row.num_jobs, row.evidence) for row in rows}
        return self._held[place]

    def _changed(self, place: _Place) -> None:
        self._versions[place] = self._versions.get(place, 0) + 1
        self._totals.pop(place, None)

    def _last_used(self, place: _Place) -> datetime:
        if rows := self._unread.get(place):
            return max(row.as_of for row in rows)
        return max(held.evidence.all.as_of for held in self._held[place].values())

    def _total(self, place: _Place) -> EvidenceSums | None:
        if place not in self._totals:
            leaves = [held.evidence.all for held in self._open(place).values()]
            if not leaves:
                return None
            self._totals[place] = together(leaves, self._half_life)
        return self._totals[place]


def _place(key: EvidenceKey) -> _Place:
    return key.task, key.drafter
