"""Which segments of a task have evidence of their own. A segment is a free label, so there may be any number.

A decision reads the evidence of all segments of its task: 5,000 of them cost 0.2 s. So a task keeps the `MOST_SEGMENTS`
that were used last apart. Jobs of other segments share the evidence of the task's jobs without a segment. They add to
it and are decided from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final, Protocol, TypeVar

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import MAX_TASKS, EvidenceSums, JobLengths, KeyEvidence, Place, Standing, together
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationErrors
from alphaloop.deciding.goodput import DrafterState
from alphaloop.store.acceptance_state import AcceptanceStateStore, StateRow
from alphaloop.store.drafts import DraftRegistry
from alphaloop.switchback.expectation import ExpectationPair

#: Of a task, beside its jobs without a segment.
MOST_SEGMENTS: Final = 64


class Used(Protocol):
    """Evidence of a segment."""

    @property
    def segment(self) -> str: ...
    @property
    def as_of(self) -> datetime: ...


Row = TypeVar("Row", bound=Used)


def last_used(rows: Iterable[Used]) -> dict[str, datetime]:
    """When each segment was used last."""
    found: dict[str, datetime] = {}
    for row in rows:
        found[row.segment] = max(row.as_of, found.get(row.segment, row.as_of))
    return found


def of_segments_used_last(rows: list[Row]) -> list[Row]:
    """The rows of the segments that are kept apart, and those without a segment."""
    used = last_used(rows)
    used.pop("", None)
    if len(used) <= MOST_SEGMENTS:
        return rows
    kept = {"", *nlargest(MOST_SEGMENTS, used, key=lambda segment: (used[segment], segment))}
    return [row for row in rows if row.segment in kept]


class SegmentsApart:
    """Decides for each job whether its segment is kept apart.

    A new segment is, while the task has few. Otherwise the segment used last longest ago makes room, but only after
    `idle`, so that nobody who makes up segments pushes out those in use.
    """

    def __init__(
        self, known: Callable[[str], Mapping[str, datetime]], *, idle: timedelta, now: Callable[[], datetime]
    ) -> None:
        """`known` gives the segments of a task of which there is evidence, and when they were used last."""
        self._known = known
        self._idle = idle
        self._now = now
        self._used: dict[str, dict[str, datetime]] = {}
        self._lock = threading.Lock()

    def keeps(self, task: str, segment: str) -> bool:
        """Whether jobs of this segment have evidence of their own from now on."""
        if not segment:
            return True
        now = self._now()
        with self._lock:
            used = self._used.setdefault(task, {})
            if segment not in used and not self._makes_room(task, used, now):
                return False
            used[segment] = now
            return True

    def _makes_room(self, task: str, used: dict[str, datetime], now: datetime) -> bool:
        if len(used) < MOST_SEGMENTS:
            # Other workers may have seen segments that this one has not.
            others = {name: at for name, at in self._known(task).items() if name and name not in used}
            room = MOST_SEGMENTS - len(used)
            used.update((name, others[name]) for name in nlargest(room, others, key=lambda name: others[name]))
        if len(used) < MOST_SEGMENTS:
            return True
        oldest = min(used, key=lambda name: used[name])
        if now - used[oldest] < self._idle:
            return False
        del used[oldest]
        return True


class ReadPairs(Protocol):
    """Reads the pairs of this target, engine and device that were closed after a moment, or all that count."""

    def __call__(self, *, since: datetime | None) -> Sequence[ExpectationPair]: ...


@dataclass(frozen=True, slots=True)
class _Held:
    num_jobs: int
    evidence: KeyEvidence
    position: int  #: the last row of the ledger that it includes

    @classmethod
    def of(cls, row: StateRow) -> _Held:
        """As the row says."""
        return cls(row.num_jobs, row.evidence, row.last_ledger_id)


@dataclass(frozen=True, slots=True)
class _Use:
    segment: str
    as_of: datetime


class EvidenceCache:
    """Rows of acceptance_state for one target, one engine and this worker's drafters, which drafts are stale, and how
    expectations compared with what was measured.

    An `EvidenceSource`. `refresh` reads changes from the database, and `take` is given the rows that this worker's own
    outcomes changed, both from any thread. Everything else answers from memory.
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
        pairs: ReadPairs | None = None,
    ) -> None:
        """Without `pairs`, no expectation is corrected."""
        self._store = store
        self._registry = registry
        self._read_pairs = pairs
        self._errors = None if pairs is None else ExpectationErrors(half_life)
        self._newest_pair: datetime | None = None
        self._served = (target_revision, engine, dict(drafters))
        self._half_life = half_life
        self._lock = threading.RLock()
        self._seen: int | None = None
        self._stale: frozenset[tuple[str, str]] = frozenset()
        self._unread: dict[Place, list[StateRow]] = {}  # as they were read: most tasks are never asked for
        self._held: dict[Place, dict[EvidenceKey, _Held]] = {}
        self._totals: dict[Place, EvidenceSums] = {}
        self._versions: dict[Place, int] = {}

    def refresh(self) -> None:
        """Read which drafts are stale, and the rows that changed since the last read; the first time, all of them.

        Raises StoreError, and the cache stays as it was.
        """
        target_revision, engine, drafters = self._served
        stale = frozenset(self._registry.stale(target_revision))
        read = self._store.read(target_revision, engine, drafters, since=self._seen)
        if self._read_pairs is not None and self._errors is not None:
            pairs = self._read_pairs(since=self._newest_pair)
            self._errors.add(pairs)
            self._newest_pair = max((pair.computed_at for pair in pairs), default=self._newest_pair)
        with self._lock:
            self._stale = stale
            if read.is_all:
                self._begin_with(read.rows)
            else:
                self.take(read.rows)
            self._seen = read.seen

    def is_stale(self, drafter: str, revision: str) -> bool:
        """Whether that draft is flagged stale, or retired."""
        return (drafter, revision) in self._stale

    def take(self, rows: Iterable[StateRow]) -> None:
        """Hold these rows, except where a newer one is held, because two threads bring rows."""
        with self._lock:
            for row in rows:
                self._take(row)

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""
        return self._versions.get(place, 0)

    def standing(self, place: Place, now: datetime) -> Standing:
        """The evidence there, by key, faded to `now`."""
        with self._lock:
            held = self._open(place)
            leaves = {
                key: one.evidence.faded(max(now, one.evidence.all.as_of), self._half_life) for key, one in held.items()
            }
            error = self._errors.of(place.task, place.drafter, now) if self._errors else NO_ERROR
            return Standing(leaves, error)

    def last_used(self, place: Place) -> datetime | None:
        """When the last job there ended; None without any."""
        with self._lock:
            return self._last_used(place) if self._open(place) else None

    def of_tasks(self, drafter: DrafterState, now: datetime) -> list[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""
        with self._lock:
            mine = (drafter.name, drafter.revision)
            places = [place for place in self._unread.keys() | self._held.keys() if place[1:] == mine]
            if len(places) > MAX_TASKS:
                places = nlargest(MAX_TASKS, places, key=self._last_used)
            known = [total for place in sorted(places) if (total := self._total(place)) is not None]
            return [total.faded(max(now, total.as_of), self._half_life) for total in known]

    def segments(self, task: str) -> dict[str, datetime]:
        """The segments of the task of which there is evidence, and when they were used last."""
        with self._lock:
            places = [place for place in self._unread.keys() | self._held.keys() if place.task == task]
            return last_used(
                _Use(key.segment, held.evidence.all.as_of)
                for place in places
                for key, held in self._open(place).items()
            )

    def lengths(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters together."""
        places = (Place(task), *(Place(task, drafter.name, drafter.revision) for drafter in drafters))
        with self._lock:
            held = [one.evidence.all for place in places for one in self._open(place).values()]
        return JobLengths.of((0.5 ** (max(now - its.as_of, timedelta(0)) / self._half_life), its) for its in held)

    def _begin_with(self, rows: Iterable[StateRow]) -> None:
        self._unread, self._held, self._totals = {}, {}, {}
        for row in rows:
            self._unread.setdefault(_place_of(row), []).append(row)
        self._unread = {place: of_segments_used_last(held) for place, held in self._unread.items()}
        for place in self._unread.keys() | self._versions.keys():
            self._changed(place, 1)

    def _take(self, row: StateRow) -> None:
        key, place = row.key, _place_of(row)
        held = self._open(place)
        if key in held and held[key].position >= row.last_ledger_id:
            return
        num_more = row.num_jobs - held[key].num_jobs if key in held else row.num_jobs
        is_new_segment = bool(row.segment) and all(other.segment != row.segment for other in held)
        held[key] = _Held.of(row)
        if is_new_segment:
            self._forget_segments(place)
        self._changed(place, max(1, num_more))

    def _open(self, place: Place) -> dict[EvidenceKey, _Held]:
        if place not in self._held:
            rows = self._unread.pop(place, [])
            self._held[place] = {row.key: _Held.of(row) for row in rows}
        return self._held[place]

    def _forget_segments(self, place: Place) -> None:
        uses = [_Use(key.segment, one.evidence.all.as_of) for key, one in self._held[place].items()]
        kept = {use.segment for use in of_segments_used_last(uses)}
        self._held[place] = {key: one for key, one in self._held[place].items() if key.segment in kept}

    def _changed(self, place: Place, num_more: int) -> None:
        self._versions[place] = self._versions.get(place, 0) + num_more
        self._totals.pop(place, None)

    def _last_used(self, place: Place) -> datetime:
        if rows := self._unread.get(place):
            return max(row.as_of for row in rows)
        return max(held.evidence.all.as_of for held in self._held[place].values())

    def _total(self, place: Place) -> EvidenceSums | None:
        if place not in self._totals:
            leaves = [held.evidence.all for held in self._open(place).values()]
            if not leaves:
                return None
            self._totals[place] = together(leaves, self._half_life)
        return self._totals[place]


def _place_of(row: StateRow) -> Place:
    """As `place_of`, without the key: most rows are never asked for their key."""
    return Place(row.task, row.pair.drafter, row.pair.draft_revision)
