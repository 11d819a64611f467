"""The waiting jobs of one task and lane, by priority with ageing and then by arrival. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from worker.jobs.beginnings import Beginning, HeldBeginnings, SharingSlack
from worker.jobs.lanes import LaneKey

Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(slots=True)
class WaitingJob(Generic[Item]):
    """A job with what its place in the order depends on."""

    lane: LaneKey
    item: Item
    num_bytes: int
    since_s: float
    beginnings: tuple[Beginning, ...] = ()  #: of its prompt, the longest first
    is_high: bool = False  #: it starts before the jobs of its task that are not
    is_waiting: bool = True


Place = tuple[float, int]  #: rank and number of arrival: the least is served first
_Heap = list[tuple[float, int, WaitingJob[Item]]]


@dataclass(frozen=True, slots=True)
class Load:
    """Waiting jobs and their bytes."""

    num_jobs: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _Overtaking:
    """Jobs that were taken before their turn, as long as jobs wait that they overtook."""

    jobs: list[tuple[Place, float]] = field(default_factory=list)  # a heap of places, with expected device seconds
    device_s: float = 0.0  #: of these jobs together

    def add(self, place: Place, device_s: float) -> None:
        heappush(self.jobs, (place, device_s))
        self.device_s += device_s

    def forget_before(self, place: Place | None) -> None:
        """The first waiting job has this place now; None if no job waits. Jobs before it overtook nobody that waits."""
        while self.jobs and (place is None or self.jobs[0][0] < place):
            self.device_s -= heappop(self.jobs)[1]
        if not self.jobs:
            self.device_s = 0.0  # without what rounding left


@dataclass(slots=True)
class WaitingJobs(Generic[Item]):
    """Traffic waits in one heap, because lanes of traffic may run together; each measured lane waits in its own.

    The effective priority of a job is `priority + waited_s / ageing_s`. It grows equally fast for all jobs, so the
    order of two jobs never changes: it is the order of `since_s - priority * ageing_s`, the rank.

    A job whose prompt begins like a running job's may overtake: less than `slack` after the first job in rank, and only
    while the jobs that overtook the first job are expected to take no more than `slack`. What overtook a later job also
    overtook the first one, so the limit holds for every job.
    """

    num_jobs: int = 0
    _traffic: _Heap[Item] = field(default_factory=list)
    _measured: dict[LaneKey, _Heap[Item]] = field(default_factory=dict)
    _arrivals: deque[WaitingJob[Item]] = field(default_factory=deque)
    _by_beginning: dict[Beginning, _Heap[Item]] = field(default_factory=dict)  # traffic; heaps may hold taken jobs
    _overtaking: _Overtaking = field(default_factory=_Overtaking)

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
        entry = (*place, job)
        heappush(heap, entry)
        if heap is self._traffic:
            for beginning in job.beginnings:
                if beginning in self._by_beginning:
                    heappush(self._by_beginning[beginning], entry)
                else:
                    self._by_beginning[beginning] = [entry]
        self._arrivals.append(job)
        self.num_jobs += 1

    def measured_lanes(self) -> list[LaneKey]:
        """The measured lanes in which jobs wait, the one with the first job first."""
        return sorted(self._measured, key=lambda lane: self._measured[lane][0][:2])

    def is_measured_first(self) -> bool:
        """Whether the first job of all is a probe or a control."""
        if not self._measured:  # nearly always
            return False
        first = min(heap[0][:2] for heap in self._measured.values())
        return not self._traffic or first < self._traffic[0][:2]

    def num_measured(self, lane: LaneKey) -> int:
        """How many jobs wait in a measured lane."""
        return len(self._measured.get(lane, ()))

    def num_shared(self, held: HeldBeginnings, slack: SharingSlack, job_s: float) -> int:
        """Tokens that the job that `take_traffic` would take shares with a running job; 0 where no traffic waits."""
        return self._next(held, slack, job_s)[1] if self._traffic else 0

    def take_traffic(self, held: HeldBeginnings, slack: SharingSlack, job_s: float) -> WaitingJob[Item]:
        """Take out the first job of traffic, or one that may overtake. `job_s`: device seconds that jobs take.

        Raises:
            IndexError: no traffic waits.
        """
        (rank, number, job), _ = self._next(held, slack, job_s)
        if job is not self._traffic[0][2]:
            self._overtaking.add((rank, number), job_s)
        job = self._taken(job)
        _drop_taken(self._traffic)
        for beginning in job.beginnings:
            _drop_taken(alike := self._by_beginning[beginning])
            if not alike:
                del self._by_beginning[beginning]
        self._overtaking.forget_before(self._traffic[0][:2] if self._traffic else None)
        return job

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
        self._measured = _all_still_waiting(self._measured)
        self._by_beginning = _all_still_waiting(self._by_beginning)
        return gone

    def _next(
        self, held: HeldBeginnings, slack: SharingSlack, job_s: float
    ) -> tuple[tuple[float, int, WaitingJob[Item]], int]:
        """The job that is taken next, with its place, and the tokens that it shares with a running job."""
        first = self._traffic[0]
        if not held.beginnings or not self._by_beginning:
            return first, 0
        num_shared = next((one.num_tokens for one in first[2].beginnings if one in held.beginnings), 0)
        longer = [one for one in held.beginnings & self._by_beginning.keys() if one.num_tokens > num_shared]
        for beginning in sorted(longer, reverse=True):
            candidate, slack_s = self._by_beginning[beginning][0], slack.of(beginning.num_tokens)
            if self._overtaking.device_s + job_s > slack_s:
                break  # shorter beginnings have less slack
            if candidate[0] - first[0] < slack_s:
                return candidate, beginning.num_tokens
        return first, num_shared

    def _taken(self, job: WaitingJob[Item]) -> WaitingJob[Item]:
        job.is_waiting = False
        self.num_jobs -= 1
        while self._arrivals and not self._arrivals[0].is_waiting:
            self._arrivals.popleft()
        return job


def _drop_taken(heap: _Heap[Item]) -> None:
    """Have a waiting job first."""
    while heap and not heap[0][2].is_waiting:
        heappop(heap)


def _still_waiting(heap: _Heap[Item]) -> _Heap[Item]:
    kept = [entry for entry in heap if entry[2].is_waiting]
    heapify(kept)
    return kept


def _all_still_waiting(heaps: dict[Key, _Heap[Item]]) -> dict[Key, _Heap[Item]]:
    kept = {key: _still_waiting(heap) for key, heap in heaps.items()}
    return {key: heap for key, heap in kept.items() if heap}
