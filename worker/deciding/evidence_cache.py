"""The evidence of all tasks in memory: read once from the database, then updated with what all workers add.

The cache holds rows of acceptance_state and never adds up jobs itself, so it holds what the database holds.

A segment is a free label, so there may be any number. A decision reads the evidence of all segments of its task: 5,000
of them cost 0.2 s. So a task keeps the `MOST_SEGMENTS` that were used last apart. Jobs of other segments share the
evidence of the task's jobs without a segment: they add to it and are decided from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final, NamedTuple

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import MAX_TASKS, EvidenceSnapshot, EvidenceSums, JobLengths, Place, Standing, place_of
from alphaloop.deciding.expectation_error import ExpectationErrors
from alphaloop.deciding.goodput import DrafterState
from alphaloop.experiment.figures import ExpectationPair
from alphaloop.store.decision_inputs import AcceptanceStateStore, DraftRegistry, StateRow

#: Segments of a task that are kept apart, beside its jobs without a segment.
MOST_SEGMENTS: Final = 64


def kept_apart(uses: Iterable[tuple[str, datetime]]) -> set[str]:
    """The segments that were used last, and the jobs without a segment; `uses` are segments with a time of use."""
    used: dict[str, datetime] = {}
    for segment, at in uses:
        used[segment] = max(at, used.get(segment, at))
    used.pop("", None)
    return {"", *nlargest(MOST_SEGMENTS, used, key=lambda segment: (used[segment], segment))}


class SegmentsApart:
    """Decides for each job whether its segment is kept apart.

    A new segment is, while the task has few. Otherwise the segment used last longest ago makes room, but only after
    `idle`, so that a client that makes up segments does not push out those in use.
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


class _Known(NamedTuple):
    """What is known of a key beside its evidence."""

    position: int  #: the last row of the ledger that it includes
    num_jobs: int


@dataclass(eq=False)
class EvidenceCache:
    """Rows of acceptance_state for one target, one engine and this worker's drafters, which drafts are stale, and how
    expectations compared with what was measured.

    An `EvidenceSource`. `refresh` reads changes from the database, and `take` is given the rows that this worker's own
    outcomes changed, both from any thread. Everything else answers from memory.

    `pairs` reads those of this target, engine and device that were closed after a moment, or all. Without it, no
    expectation is corrected.
    """

    store: AcceptanceStateStore
    registry: DraftRegistry
    _: KW_ONLY
    target_revision: str
    engine: str
    drafters: Mapping[str, str]
    half_life: timedelta
    pairs: Callable[[datetime | None], Sequence[ExpectationPair]] | None = None

    def __post_init__(self) -> None:
        self._errors = None if self.pairs is None else ExpectationErrors(self.half_life)
        self._newest_pair: datetime | None = None
        self._lock = threading.RLock()
        self._seen: int | None = None
        self._stale: frozenset[tuple[str, str]] = frozenset()
        self._read_with: Mapping[str, str] = {}  # the drafters of the last read
        self._unread: dict[Place, list[StateRow]] = {}  # as they were read: most tasks are never asked for
        self._opened = EvidenceSnapshot(self.half_life, errors=self._errors)
        self._known: dict[EvidenceKey, _Known] = {}  # of what is in the snapshot

    def refresh(self) -> None:
        """Read which drafts are stale, and the rows that changed since the last read; all where drafters were added.

        Raises StoreError, and the cache stays as it was.
        """
        stale = frozenset(self.registry.stale(self.target_revision))
        # Other workers may know a drafter that was added since.
        drafters = dict(self.drafters)
        since = self._seen if drafters == self._read_with else None
        read = self.store.read(self.target_revision, self.engine, drafters, since=since)
        if self.pairs is not None and self._errors is not None:
            pairs = self.pairs(self._newest_pair)
            self._errors.add(pairs)
            self._newest_pair = max((pair.computed_at for pair in pairs), default=self._newest_pair)
        with self._lock:
            self._stale = stale
            if read.is_all:
                self._begin_with(read.rows)
            else:
                self.take(read.rows)
            self._seen, self._read_with = read.seen, drafters

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
        return self._opened.version(place)

    def standing(self, place: Place, now: datetime) -> Standing:
        """The evidence there, by key, faded to `now`, and how wrong expectations were."""
        with self._lock:
            return self._open([place]).standing(place, now)

    def last_used(self, place: Place) -> datetime | None:
        """When the last job there ended; None without any."""
        with self._lock:
            held = self._open([place]).held(place)
            return max((evidence.all.as_of for evidence in held.values()), default=None)

    def of_tasks(self, drafter: DrafterState, now: datetime) -> list[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""
        mine = drafter.name, drafter.revision
        with self._lock:
            unread = [place for place in self._unread if place[1:] == mine]
            recent = nlargest(MAX_TASKS, unread, key=lambda place: max(row.as_of for row in self._unread[place]))
            return self._open(recent).of_tasks(drafter, now)

    def segments(self, task: str) -> dict[str, datetime]:
        """The segments of the task of which there is evidence, and when they were used last."""
        with self._lock:
            return self._open([place for place in self._unread if place.task == task]).segments(task)

    def lengths(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters together."""
        drafters = list(drafters)
        places = [Place(task), *(Place(task, drafter.name, drafter.revision) for drafter in drafters)]
        with self._lock:
            return self._open(places).lengths(task, drafters, now)

    def _begin_with(self, rows: Iterable[StateRow]) -> None:
        before = {place_of(key) for key in self._known}
        unread: dict[Place, list[StateRow]] = {}
        for row in rows:
            unread.setdefault(_place_of(row), []).append(row)
        self._opened.clear()
        self._known.clear()
        for place in self._unread.keys() | before | unread.keys():
            self._opened.changed(place, 1)
        for place, rows_there in unread.items():
            kept = kept_apart((row.segment, row.as_of) for row in rows_there)
            unread[place] = [row for row in rows_there if row.segment in kept]
        self._unread = unread

    def _take(self, row: StateRow) -> None:
        key, place = row.key, _place_of(row)
        if key.target_revision != self.target_revision:
            return  # of an adapter: evidence of its own, which says nothing of the target's
        opened = self._open([place])
        known = self._known.get(key)
        if known is not None and known.position >= row.last_ledger_id:
            return
        is_new_segment = bool(row.segment) and all(other.segment != row.segment for other in opened.held(place))
        self._hold(row, max(1, row.num_jobs - (known.num_jobs if known else 0)))
        if is_new_segment:
            held = opened.held(place)
            kept = kept_apart((key.segment, evidence.all.as_of) for key, evidence in held.items())
            gone = [key for key in held if key.segment not in kept]
            opened.forget(gone)
            for key in gone:
                del self._known[key]

    def _open(self, places: Iterable[Place]) -> EvidenceSnapshot:
        """The snapshot, with what was read of these places."""
        for place in places:
            for row in self._unread.pop(place, ()):
                self._hold(row, 0)
        return self._opened

    def _hold(self, row: StateRow, num_more: int) -> None:
        self._opened.put(row.key, row.evidence, num_more)
        self._known[row.key] = _Known(row.last_ledger_id, row.num_jobs)


def _place_of(row: StateRow) -> Place:
    """As `place_of`, without the key: most rows are never asked for their key."""
    return Place(row.task, row.drafter, row.draft_revision)
