"""The waiting jobs of one task, by priority with ageing and then by arrival. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from worker.jobs.lanes import LaneKey

Item = TypeVar("Item")


@dataclass(slots=True)
class WaitingJob(Generic[Item]):
    """A job with what its place in the order depends on."""

    lane: LaneKey
    item: Item
    num_bytes: int
    since_s: float
    is_waiting: bool = True


Place = tuple[float, int]  #: rank and number of arrival: the least is served first
_Heap = list[tuple[float, int, WaitingJob[Item]]]


@dataclass(slots=True)
class WaitingJobs(Generic[Item]):
    """Traffic waits in one heap, because lanes of traffic may run together; each measured lane waits in its own.

    The effective priority of a job is `priority + waited_s / ageing_s`. It grows equally fast for all jobs, so the
    order of two jobs never changes: it is the order of `since_s - priority * ageing_s`, the rank.
    """

    num_jobs: int = 0
    _traffic: _Heap[Item] = field(default_factory=list)
    _measured: dict[LaneKey, _Heap[Item]] = field(default_factory=dict)
    _arrivals: deque[WaitingJob[Item]] = field(default_factory=deque)

    @property
    def has_traffic(self) -> bool:
        """Whether a job waits that may run beside other lanes."""
        return bool(self._traffic)

    @property
    def oldest_since_s(self) -> float:
        """When the job that was added first began to wait.

        Raises:
            IndexError: no job waits.
        """
        return self._arrivals[0].since_s

    def add(self, place: Place, job: WaitingJob[Item]) -> None:
        """Let a job wait."""
        heap = self._measured.setdefault(job.lane, []) if job.lane.is_measured else self._traffic
        heappush(heap, (*place, job))
        self._arrivals.append(job)
        self.num_jobs += 1

    def measured_lanes(self) -> list[LaneKey]:
        """The measured lanes in which jobs wait, the one with the first job first."""
        return sorted(self._measured, key=lambda lane: self._measured[lane][0][:2])

    def is_measured_first(self) -> bool:
        """Whether the first job of all is a probe or a control."""
        first = min((heap[0][:2] for heap in self._measured.values()), default=None)
        return first is not None and (not self._traffic or first < self._traffic[0][:2])

    def num_measured(self, lane: LaneKey) -> int:
        """How many jobs wait in a measured lane."""
        return len(self._measured.get(lane, ()))

    def take_traffic(self) -> WaitingJob[Item]:
        """Take out the first job of traffic.

        Raises:
            IndexError: no traffic waits.
        """
        return self._taken(heappop(self._traffic)[2])

    def take_measured(self, lane: LaneKey) -> WaitingJob[Item]:
        """Take out the first job of a measured lane.

        Raises:
            KeyError: no job waits in this lane.
        """
        job = heappop(self._measured[lane])[2]
        if not self._measured[lane]:
            del self._measured[lane]
        return self._taken(job)

    def discard(self, unwanted: Callable[[Item], bool]) -> list[WaitingJob[Item]]:
        """Take out and return the jobs for which `unwanted` holds, in order of arrival. O(n)."""
        waiting = [job for job in self._arrivals if job.is_waiting]
        gone = [job for job in waiting if unwanted(job.item)]
        if not gone:
            return gone
        for job in gone:
            job.is_waiting = False
        self._arrivals = deque(job for job in waiting if job.is_waiting)
        self.num_jobs = len(self._arrivals)
        self._traffic = _still_waiting(self._traffic)
        heaps = {lane: _still_waiting(heap) for lane, heap in self._measured.items()}
        self._measured = {lane: heap for lane, heap in heaps.items() if heap}
        return gone

    def _taken(self, job: WaitingJob[Item]) -> WaitingJob[Item]:
        job.is_waiting = False
        self.num_jobs -= 1
        while self._arrivals and not self._arrivals[0].is_waiting:
            self._arrivals.popleft()
        return job


def _still_waiting(heap: _Heap[Item]) -> _Heap[Item]:
    kept = [entry for entry in heap if entry[2].is_waiting]
    heapify(kept)
    return kept
