"""The order of the jobs of one segment in one lane: bands of priority, then least slack, then arrival. Pure.

The effective priority of a job is `priority + waited_s / AGEING_S`. It grows equally fast for all jobs, so two jobs
never change places by waiting: their order is that of the rank, `since - priority * AGEING_S`, the least first. A band
is `AGEING_S` of rank, one whole step. Priorities end at `TOP_PRIORITY`, and so do bands: jobs that have reached it are
one band, the top one.

The slack of a job is `deadline - now - expected service time`; without a deadline it is infinite. Within a band the
least slack goes first, and jobs of equal slack by rank. In the top band a job without a deadline still has one start in
`1 / UNDATED_SHARE`, however many deadlines are near. A job whose slack is negative can no longer make it: it goes after
all others of its segment, until its deadline passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from alphaloop.messages.job import MAX_PRIORITY
from worker.ordering.prefixes import Prefix, SharedPrefixes

if TYPE_CHECKING:
    from worker.admission import LaneKey

Item = TypeVar("Item")
Place: TypeAlias = tuple[float, int]  # rank and number of arrival: the least is served first
AGEING_S: Final = 10.0  #: a wait of this length counts as one step of priority
TOP_PRIORITY: Final = MAX_PRIORITY  #: effective priorities rise no higher for the order of slacks
#: The part of a segment's starts in a lane for jobs without a deadline in the top band, while others have slack.
UNDATED_SHARE: Final = 0.1
_ROUNDING: Final = 1e-9
_FEW: Final = 32  # entries of a heap


@dataclass(slots=True)
class WaitingJob(Generic[Item]):
    """A waiting job with what its place in the order depends on. Times are seconds of the caller's clock."""

    place: Place
    lane: LaneKey
    segment: str
    item: Item
    num_bytes: int
    prefixes: tuple[Prefix, ...]  #: of its prompt, the longest first
    is_high: bool
    deadline_s: float = math.inf
    latest_start_s: float = math.inf  #: deadline less the expected service time, as it was when last looked at
    is_late: bool = False  #: it can no longer make its deadline
    is_waiting: bool = True

    @property
    def band(self) -> int:
        """The least is served first."""
        return math.floor(self.place[0] / AGEING_S)


#: May hold jobs that were taken elsewhere, but never as its first. So may the others.
JobHeap: TypeAlias = list[tuple[Place, WaitingJob[Item]]]
#: By band, 0 for all of the top band, and latest start.
_SlackHeap: TypeAlias = list[tuple[int, float, Place, WaitingJob[Item]]]


_Entry = TypeVar("_Entry", bound=tuple[Any, ...])


def drop_gone(
    heap: list[_Entry],
    num_left: int,
    is_here: Callable[[WaitingJob[Any]], bool] = lambda job: job.is_waiting,
) -> None:
    """Have an entry first whose job is here, and no more than twice as many entries as jobs are `num_left`."""
    while heap and not is_here(heap[0][-1]):
        heappop(heap)
    if len(heap) > 2 * num_left + _FEW:
        heap[:] = [entry for entry in heap if is_here(entry[-1])]
        heapify(heap)


def _has_turn(job: WaitingJob[Any]) -> bool:
    """Whether it waits, and not after all others."""
    return job.is_waiting and not job.is_late


@dataclass(slots=True)
class _Ranked(Generic[Item]):
    """Jobs by rank, and how far jobs whose prompts begin alike may overtake.

    A job whose prompt begins like a running job's may overtake: less than its lead after the first job in
    rank, and only while the jobs that overtook the first job are expected to take no more than that lead. What
    overtook a later job also overtook the first one, so the limit holds for every job.
    """

    heap: JobHeap[Item] = field(default_factory=list)
    by_prefix: dict[Prefix, JobHeap[Item]] = field(default_factory=dict)
    #: Jobs that were taken before their turn, with their expected device seconds, as long as jobs wait before them.
    overtaking: list[tuple[Place, float]] = field(default_factory=list)
    overtaking_s: float = 0.0  #: expected device seconds of these jobs together
    num_jobs: int = 0

    def add(self, job: WaitingJob[Item]) -> None:
        self.num_jobs += 1
        heappush(self.heap, (job.place, job))
        for prefix in job.prefixes:
            heappush(self.by_prefix.setdefault(prefix, []), (job.place, job))

    def sharing(
        self, first: WaitingJob[Item], shared: SharedPrefixes, job_s: float, spare_s: float
    ) -> tuple[WaitingJob[Item], int]:
        """The job that starts where `first` is at its turn, and the tokens that it shares with a running job.

        `job_s`: what jobs take. `spare_s`: the most time that `first` can wait.
        """
        if not shared.held or not self.by_prefix:
            return first, 0
        num_shared = next((prefix.num_tokens for prefix in first.prefixes if prefix in shared.held), 0)
        longer = [prefix for prefix in shared.held & self.by_prefix.keys() if prefix.num_tokens > num_shared]
        for prefix in sorted(longer, reverse=True):
            candidate, lead_s = self.by_prefix[prefix][0][1], shared.lead_s(prefix.num_tokens)
            if self.overtaking_s + job_s > lead_s:
                break  # shorter prefixes have a shorter lead
            if lead_s < spare_s and candidate.place[0] - first.place[0] < lead_s:
                return candidate, prefix.num_tokens
        return first, num_shared

    def take(self, job: WaitingJob[Item], *, is_first: bool, job_s: float) -> None:
        """Take a job out; one that is not at its turn overtakes."""
        if not is_first:
            heappush(self.overtaking, (job.place, job_s))
            self.overtaking_s += job_s
        self.remove(job)
        while self.overtaking and (not self.heap or self.overtaking[0][0] < self.heap[0][0]):
            self.overtaking_s -= heappop(self.overtaking)[1]  # what it overtook has started
        if not self.overtaking:
            self.overtaking_s = 0.0  # without what rounding left

    def remove(self, job: WaitingJob[Item]) -> None:
        """Drop a job that has no turn any more."""
        self.num_jobs -= 1
        drop_gone(self.heap, self.num_jobs, _has_turn)
        for prefix in job.prefixes:
            drop_gone(alike := self.by_prefix[prefix], self.num_jobs, _has_turn)
            if not alike:
                del self.by_prefix[prefix]


class SegmentOrder(Generic[Item]):
    """The waiting traffic of one segment in its task's high lane, or in the normal one."""

    def __init__(self, service_s: Callable[[LaneKey, Item], float]) -> None:
        """`service_s`: seconds from a job's turn to its end, as expected at today's load."""
        self._service_s = service_s
        self._undated: _Ranked[Item] = _Ranked()
        self._dated: _Ranked[Item] = _Ranked()  # with deadlines that they can make
        self._rising: _SlackHeap[Item] = []  # of these, jobs that have not reached the top band
        self._top: _SlackHeap[Item] = []
        self._late: JobHeap[Item] = []
        self._owed = 0.0  # starts of jobs without a deadline in the top band
        self.num_jobs = 0

    def add(self, job: WaitingJob[Item]) -> None:
        """Let a job wait."""
        self.num_jobs += 1
        if job.deadline_s == math.inf:
            self._undated.add(job)
        else:
            job.latest_start_s, job.is_late = job.deadline_s - self._service_s(job.lane, job.item), False
            self._dated.add(job)
            heappush(self._rising, (job.band, job.latest_start_s, job.place, job))

    def waiting(self) -> list[WaitingJob[Item]]:
        """Every job here, in no order."""
        in_turn = [job for ranked in (self._undated, self._dated) for _, job in ranked.heap if _has_turn(job)]
        return in_turn + [job for _, job in self._late if job.is_waiting]

    @property
    def num_undated(self) -> int:
        """Jobs without a deadline."""
        return self._undated.num_jobs

    @property
    def num_dated(self) -> int:
        """Jobs with a deadline."""
        return self.num_jobs - self._undated.num_jobs

    @property
    def eldest(self) -> Place:
        """The place of the first in rank."""
        return min(heap[0][0] for heap in (self._undated.heap, self._dated.heap, self._late) if heap)

    def first(self, now: float) -> WaitingJob[Item]:
        """The job at its turn, of at least one that waits."""
        undated = self._undated.heap[0][1] if self._undated.heap else None
        dated = self._least_slack(now) if self._dated.heap else None
        if dated is None or undated is None:
            return dated or undated or self._late[0][1]
        top = _top_band(now)
        if undated.band > top or dated.band > top:
            return dated if dated.band <= max(undated.band, top) else undated
        return undated if self._owed >= 1 - _ROUNDING else dated

    def next(self, shared: SharedPrefixes, job_s: float, now: float) -> tuple[WaitingJob[Item], int]:
        """The job that starts next, and the tokens that it shares with a running job. `job_s`: what jobs take."""
        return self._sharing(self.first(now), shared, job_s, now)

    def _sharing(
        self, first: WaitingJob[Item], shared: SharedPrefixes, job_s: float, now: float
    ) -> tuple[WaitingJob[Item], int]:
        if first.is_late or not shared.held:
            return first, 0
        ranked = self._undated if first.deadline_s == math.inf else self._dated
        return ranked.sharing(first, shared, job_s, spare_s=first.latest_start_s - now)

    def take(self, shared: SharedPrefixes, job_s: float, now: float) -> WaitingJob[Item]:
        """Take out the job that starts next."""
        first = self.first(now)
        job, _ = self._sharing(first, shared, job_s, now)
        job.is_waiting = False
        self.num_jobs -= 1
        if job.is_late:
            drop_gone(self._late, self.num_jobs)
        elif job.deadline_s == math.inf:
            self._owed = max(0.0, self._owed - 1)
            self._undated.take(job, is_first=job is first, job_s=job_s)
        else:
            if self._undated.heap and self._undated.heap[0][1].band <= _top_band(now):
                self._owed += UNDATED_SHARE / (1 - UNDATED_SHARE)
            self._dated.take(job, is_first=job is first, job_s=job_s)
        return job

    def remove(self, job: WaitingJob[Item]) -> None:
        """Take out a job whose deadline has passed."""
        job.is_waiting = False
        self.num_jobs -= 1
        if job.is_late:
            drop_gone(self._late, self.num_jobs)
        else:
            self._dated.remove(job)

    def _least_slack(self, now: float) -> WaitingJob[Item] | None:
        """The first of the jobs that can make their deadlines; those that cannot any more become late."""
        top = _top_band(now)
        while self._rising and self._rising[0][0] <= top:
            heappush(self._top, (0, *heappop(self._rising)[1:]))
        return self._head(self._top, now) or self._head(self._rising, now)

    def _head(self, heap: _SlackHeap[Item], now: float) -> WaitingJob[Item] | None:
        """The first by slack, as it is at today's load."""
        drop_gone(heap, self._dated.num_jobs, _has_turn)
        while heap:
            band, before_s, place, job = heap[0]
            if _has_turn(job):
                job.latest_start_s = job.deadline_s - self._service_s(job.lane, job.item)
                if job.latest_start_s < now:
                    job.is_late = True
                    self._dated.remove(job)
                    heappush(self._late, (place, job))
                elif job.latest_start_s <= before_s:
                    return job
            heappop(heap)
            if _has_turn(job):
                heappush(heap, (band, job.latest_start_s, place, job))
        return None


def _top_band(now: float) -> int:
    """Jobs of this band, and of those before it, have reached `TOP_PRIORITY`."""
    return math.floor((now - TOP_PRIORITY * AGEING_S) / AGEING_S)
