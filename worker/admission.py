"""Which waiting job is admitted next, and which jobs are decided together: those of a lane. Pure.

Three criteria, in this order:

1. *Share of device time* between tasks, and between the segments of a task (`ordering/sharing.py`). Who had the least
   device time over weight goes next. Jobs of a task without a segment are one segment. A task's jobs of the high lane
   go first, but for `NORMAL_SHARE` of the starts.
2. *Priority with age, then slack* within a segment (`ordering/segment_order.py`): bands of whole steps of effective
   priority, then the least slack until the deadline, then the arrival.
3. *Shared prefix* (`ordering/prefixes.py`). Jobs whose prompts begin alike save the device time in which that prefix is
   read, as long as they run together. So a job may overtake others of its segment, and its task and segment may stay
   at their turn, within a lead.

A job whose deadline has passed needs no device, so it leaves at once, before all others.

Probes and controls run alone: one lane of them has the device for up to as many jobs as there are slots, because some
servers count what was drafted and accepted only for all of their requests together. Then as many jobs of traffic go
first, as far as traffic waits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import fmean
from typing import Final, Generic, NamedTuple, TypeVar

from alphaloop.engine import Sampling
from alphaloop.messages import Job, Purpose
from worker.ordering.prefixes import Prefix, SharedPrefixes
from worker.ordering.segment_order import AGEING_S, JobHeap, Place, SegmentOrder, WaitingJob, drop_gone
from worker.ordering.sharing import SHORTEST_JOB_S, FairShares

_MEASURED: Final = frozenset({Purpose.PROBE.value, Purpose.CONTROL.value})
Item = TypeVar("Item")
NORMAL_SHARE: Final = 0.2  #: of a task's starts, for jobs that are not of the high lane, while both lanes wait
MOST_EXPIRED: Final = 256  #: jobs whose deadline has passed that leave together
UNKNOWN_JOB_S: Final = 1.0  #: device seconds that a job is expected to need before any job of any task has ended
_ROUNDING: Final = 1e-9


@dataclass(eq=False)
class AdmissionQueue(Generic[Item]):
    """The waiting jobs of a worker. Time is whatever clock the caller counts seconds with."""

    _: KW_ONLY
    num_slots: int  #: the engine's; also the jobs of a lane of probes or controls that are admitted in one turn
    quantum_s: float = 1.0  #: device seconds over weight that a task may be ahead of the task that had least
    #: The weight of a task, above 0; asked whenever the task is charged, so weights may change.
    weight_of: Callable[[str], float] = lambda task: 1.0
    #: The weight of a segment; the empty one is that of jobs without a segment.
    weight_of_segment: Callable[[str], float] = lambda segment: 1.0
    #: Device seconds in which the target reads this number of prompt tokens, as measured.
    read_s: Callable[[int], float] = lambda num_tokens: 0.0
    #: Seconds from the turn of a job to its end, as expected at today's load; asked for jobs with a deadline.
    service_s: Callable[[LaneKey, Item], float] = lambda lane, item: 0.0

    def __post_init__(self) -> None:
        self._shared = SharedPrefixes(self.num_slots, self.read_s)
        self._tasks: dict[str, _Task[Item]] = {}
        self._backlogged: dict[str, _Task[Item]] = {}
        self._shares = FairShares(self.weight_of, self._mean_over_tasks_s)
        self._served_last: str | None = None
        self._now = 0.0
        self._mean_s: float | None = None  # device seconds of a job, over all tasks; None until needed
        self._alone: LaneKey | None = None  # the lane that has the device, or has it once the engine is empty
        self._num_alone_left = 0  # jobs that it may still admit
        self._num_traffic_first = 0  # jobs of traffic that go before the next such lane
        self._arrival = count()
        self._num_jobs = {True: 0, False: 0}  # by whether they are of the high lane
        self._num_bytes = {True: 0, False: 0}
        self._by_deadline: list[tuple[float, Place, WaitingJob[Item]]] = []  # may hold jobs that were taken

    def __len__(self) -> int:
        return self._num_jobs[True] + self._num_jobs[False]

    def num_waiting(self, task: str, segment: str, is_dated: bool | None = None, *, is_high: bool) -> int:
        """The waiting jobs of a segment in one of its task's lanes, but for probes and controls.

        `is_dated`: those with a deadline, or those without; None: all.
        """
        known = self._tasks.get(task)
        traffic = known.lanes[is_high].get(segment) if known is not None else None
        if traffic is None:
            return 0
        return traffic.num_jobs if is_dated is None else traffic.num_dated if is_dated else traffic.num_undated

    def load(self, *, is_high: bool) -> tuple[int, int]:
        """The waiting jobs of the high lanes, or of the others, and their bytes as given to `add`."""
        return self._num_jobs[is_high], self._num_bytes[is_high]

    def add(
        self,
        lane: LaneKey,
        item: Item,
        *,
        priority: int,
        num_bytes: int,
        now: float,
        prefixes: tuple[Prefix, ...] = (),
        is_high: bool = False,
        segment: str = "",
        deadline_s: float = math.inf,
    ) -> None:
        """Let a job wait; `now` is when its waiting began, `prefixes` are its prompt's, the longest first.

        `is_high`: it is of the high lane. Probes and controls never are, and have no segment. `deadline_s`: on the
        clock of `now`; a probe or control has none here.
        """
        task = self._task(lane.task)
        if not task.num_jobs:
            self._shares.wait(task.name)
            self._backlogged[task.name] = task
        place = now - priority * AGEING_S, next(self._arrival)
        is_high = is_high and not lane.is_measured
        job = WaitingJob(
            place,
            lane,
            segment="" if lane.is_measured else segment,
            item=item,
            num_bytes=num_bytes,
            prefixes=prefixes,
            is_high=is_high,
            deadline_s=math.inf if lane.is_measured else deadline_s,
        )
        task.add(job)
        if job.deadline_s < math.inf:
            heappush(self._by_deadline, (job.deadline_s, job.place, job))
        self._count(job, 1)

    def next(self, limit: int, *, running: Mapping[Line, int], now: float) -> list[tuple[LaneKey, Item]]:
        """Take out the jobs that are admitted now, in their order; none where none may be.

        Up to `MOST_EXPIRED` jobs whose deadline has passed come first, to be ended.

        Args:
            limit: the most jobs to take out that need the device.
            running: how many jobs taken out before have not ended, by line. Jobs that are still being claimed count.
            now: on the clock of `add`.
        """
        self._now = now
        self._observe(running)
        lanes = {line.lane for line, num_running in running.items() if num_running > 0}
        self._end_turn_alone(lanes)
        taken = self._take_expired() if self._alone is None else []
        taken += self._take_traffic(limit) or self._take_alone(limit, lanes)
        return [(job.lane, job.item) for job in taken]

    def charge(self, device_s: Mapping[Line, float]) -> None:
        """Count the device seconds of an engine step, by line."""
        by_task: defaultdict[str, float] = defaultdict(float)
        for (lane, segment), line_s in device_s.items():
            by_task[lane.task] += line_s
            if not lane.is_measured:
                self._task(lane.task).shares.charge(segment, line_s)
        for name, task_s in by_task.items():
            self._shares.charge(name, task_s)

    def discard(self, unwanted: Callable[[Item], bool]) -> None:
        """Drop the jobs for which `unwanted` holds (their partition went to another worker). O(n)."""
        for job in [job for task in self._backlogged.values() for job in task.discard(unwanted)]:
            self._count(job, -1)
        for name in [name for name, task in self._backlogged.items() if not task.num_jobs]:
            self._wait_no_more(name)

    def _take_expired(self) -> list[WaitingJob[Item]]:
        """Jobs whose deadlines have passed. They need no device, so they count for no share and for no limit of it."""
        taken: list[WaitingJob[Item]] = []
        waiting = self._by_deadline
        drop_gone(waiting, len(self))
        while waiting and len(taken) < MOST_EXPIRED and waiting[0][0] <= self._now:
            job = waiting[0][-1]
            self._tasks[job.lane.task].remove(job)
            self._leave(job)
            taken.append(job)
            drop_gone(waiting, len(self))
        return taken

    def _take_traffic(self, limit: int) -> list[WaitingJob[Item]]:
        """Traffic up to `limit`, or up to where a probe or control is next: the turn of its lane begins there.

        A task goes on until it is more than `quantum_s` ahead of the least-served, the quantum of deficit round robin
        (Shreedhar and Varghese, 1995), so that jobs of one task run together.
        """
        taken: list[WaitingJob[Item]] = []
        if self._alone is not None:
            return taken
        tasks = {name: task for name, task in self._backlogged.items() if task.has_traffic}
        may_be_alone = not (self._num_traffic_first and tasks)
        if may_be_alone:
            tasks = dict(self._backlogged)
        serving = tasks.get(self._served_last or "")
        rival = self._least_served(tasks, but=serving)  # only the task that is served changes its virtual time here
        while len(taken) < limit and tasks:
            if rival is not None and (serving is None or self._is_ahead(serving, rival)):
                serving, rival = rival, self._least_served(tasks, but=rival)
            assert serving is not None  # noqa: S101 - a task is left, and it is no rival of itself
            if may_be_alone and serving.is_measured_first(self._shared, self._now):
                self._alone, self._num_alone_left = serving.first_measured_lane(), self.num_slots
                break
            job = serving.take_traffic(self._shared, self._now)
            taken.append(self._admit(serving, job))
            if not (serving.num_jobs if may_be_alone else serving.has_traffic):
                del tasks[serving.name]
                serving = None
        self._num_traffic_first = max(0, self._num_traffic_first - len(taken))
        return taken

    def _is_ahead(self, serving: _Task[Item], rival: _Task[Item]) -> bool:
        """Whether the served task has to leave its turn to another: unless its next job shares a running prefix."""
        ahead_s = self._shares.ahead_s(serving.name, rival.name)
        return ahead_s > self.quantum_s and ahead_s > self._shared.lead_s(serving.num_shared(self._shared, self._now))

    def _least_served(self, tasks: Mapping[str, _Task[Item]], *, but: _Task[Item] | None) -> _Task[Item] | None:
        name = self._shares.least_served(name for name, task in tasks.items() if task is not but)
        return None if name is None else tasks[name]

    def _take_alone(self, limit: int, running: Set[LaneKey]) -> list[WaitingJob[Item]]:
        """Jobs of the lane that has the device, once no other lane runs."""
        if (lane := self._alone) is None or not running <= {lane}:
            return []
        task = self._tasks[lane.task]
        num_jobs = max(0, min(limit, self._num_alone_left, task.num_measured(lane)))
        self._num_alone_left -= num_jobs
        return [self._admit(task, task.take_measured(lane)) for _ in range(num_jobs)]

    def _end_turn_alone(self, running: Set[LaneKey]) -> None:
        """End the turn of a lane whose jobs were all admitted and have ended."""
        if (lane := self._alone) is None or lane in running:
            return
        if not self._num_alone_left or not self._tasks[lane.task].num_measured(lane):
            self._alone, self._num_traffic_first, self._served_last = None, self.num_slots, None

    def _admit(self, task: _Task[Item], job: WaitingJob[Item]) -> WaitingJob[Item]:
        self._shares.admit(task.name)
        self._shared.admit(job.prefixes)
        self._served_last = task.name
        self._leave(job)
        return job

    def _leave(self, job: WaitingJob[Item]) -> None:
        self._count(job, -1)
        if not self._tasks[job.lane.task].num_jobs:
            self._wait_no_more(job.lane.task)

    def _wait_no_more(self, task: str) -> None:
        del self._backlogged[task]
        self._shares.wait_no_more(task)

    def _count(self, job: WaitingJob[Item], sign: int) -> None:
        self._num_jobs[job.is_high] += sign
        self._num_bytes[job.is_high] += sign * job.num_bytes

    def _observe(self, running: Mapping[Line, int]) -> None:
        num_running: Counter[str] = Counter()
        by_segment: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (lane, segment), num_jobs in running.items():
            num_running[lane.task] += num_jobs
            if not lane.is_measured:
                by_segment[lane.task][segment] += num_jobs
        for name in self._shares.observe(num_running):
            self._task(name).shares.observe(by_segment[name])
        self._shared.observe(num_running.total())
        self._mean_s = None

    def _mean_over_tasks_s(self) -> float:
        if self._mean_s is None:
            known_s = self._shares.known_job_s()
            self._mean_s = max(SHORTEST_JOB_S, fmean(known_s)) if known_s else UNKNOWN_JOB_S
        return self._mean_s

    def _task(self, name: str) -> _Task[Item]:
        if (task := self._tasks.get(name)) is None:
            segments = FairShares(self.weight_of_segment, partial(self._shares.expected_job_s, name))
            task = self._tasks[name] = _Task(name, segments, self.service_s)
        return task


class LaneKey(NamedTuple):
    """What the jobs of a lane have in common: they get the same decision. A tuple, because lanes are compared often."""

    task: str
    sampling_bucket: str
    decoding: str
    purpose: str
    probe_drafter: str
    probe_num_draft_tokens: int
    switched_off: str = ""  #: the operator's pattern that covers the prompts; empty if none does

    @property
    def is_measured(self) -> bool:
        """Whether the jobs are probes or controls, which run alone."""
        return self.purpose in _MEASURED


class Line(NamedTuple):
    """Jobs that wait in one line: of one lane, for which device time counts as one segment's."""

    lane: LaneKey
    segment: str = ""  #: empty: the jobs without a segment


def lane_of(job: Job, sampling: Sampling, switched_off: str = "") -> LaneKey:
    """The lane of a job.

    Args:
        job: the job as its producer sent it.
        sampling: its sampling settings with every default filled in.
        switched_off: the prompt pattern that covers the prompt, if one does.
    """
    return LaneKey(
        task=job.task,
        sampling_bucket=sampling.bucket,
        decoding=job.decoding.value,
        purpose=job.purpose.value,
        probe_drafter=job.probe_drafter or "",
        probe_num_draft_tokens=job.probe_num_draft_tokens or 0,
        switched_off=switched_off,
    )


@dataclass(slots=True)
class _Task(Generic[Item]):
    """The waiting jobs of one task. Its high lane goes first, and its normal lane always gets its share.

    While both lanes wait, each job of the high lane adds to what the normal lane is owed, so that one in
    `1 / NORMAL_SHARE` starts is a normal job however fast high ones come. An empty lane is owed nothing. Probes and
    controls count as normal jobs; each of their lanes waits in a heap of its own, because it runs alone.

    In both lanes the segments take turns. A segment has one share, whichever lane its jobs are of.
    """

    name: str
    shares: FairShares  #: of its segments
    service_s: Callable[[LaneKey, Item], float]
    num_jobs: int = 0
    #: The waiting traffic by segment, of the high lane (True) and of the normal one.
    lanes: dict[bool, dict[str, SegmentOrder[Item]]] = field(default_factory=lambda: {True: {}, False: {}})
    measured: dict[LaneKey, JobHeap[Item]] = field(default_factory=dict)
    owed: float = 0.0  #: starts of the normal lane
    served_last: str | None = None  #: segment

    @property
    def has_traffic(self) -> bool:
        return bool(self.lanes[True] or self.lanes[False])

    def add(self, job: WaitingJob[Item]) -> None:
        if not job.lane.is_measured and not self._is_waiting(job.segment):
            self.shares.wait(job.segment)
        self._put(job)

    def _put(self, job: WaitingJob[Item]) -> None:
        if job.lane.is_measured:
            heappush(self.measured.setdefault(job.lane, []), (job.place, job))
        else:
            lane = self.lanes[job.is_high]
            if (traffic := lane.get(job.segment)) is None:
                traffic = lane[job.segment] = SegmentOrder(self.service_s)
            traffic.add(job)
        self.num_jobs += 1

    def is_measured_first(self, shared: SharedPrefixes, now: float) -> bool:
        """Whether the job that starts next is a probe or a control."""
        if not self.measured or (self.lanes[True] and not self._is_normal_due):
            return False
        if not (normal := self.lanes[False]):
            return True
        traffic = normal[self._next_segment(normal, shared, now)]
        return self.measured[self.first_measured_lane()][0][0] < traffic.eldest

    def first_measured_lane(self) -> LaneKey:
        return min(self.measured, key=lambda lane: self.measured[lane][0][0])

    def num_measured(self, lane: LaneKey) -> int:
        return len(self.measured.get(lane, ()))

    def num_shared(self, shared: SharedPrefixes, now: float) -> int:
        """Tokens that the next job of traffic shares with a running job; 0 where no traffic waits."""
        if not self.has_traffic or not shared.held:
            return 0
        lane = self.lanes[self._is_high_next]
        segment = self._next_segment(lane, shared, now)
        return lane[segment].next(shared, self.shares.expected_job_s(segment), now)[1]

    def take_traffic(self, shared: SharedPrefixes, now: float) -> WaitingJob[Item]:
        lane = self.lanes[self._is_high_next]
        if lane is self.lanes[False]:
            self.owed = max(0.0, self.owed - 1)
        elif self.lanes[False] or self.measured:
            self.owed += NORMAL_SHARE / (1 - NORMAL_SHARE)
        else:
            self.owed = 0.0
        self.num_jobs -= 1
        segment = self._next_segment(lane, shared, now)
        job = lane[segment].take(shared, self.shares.expected_job_s(segment), now)
        self.shares.admit(segment)
        self.served_last = segment
        self._drop_empty(lane, segment)
        return job

    def remove(self, job: WaitingJob[Item]) -> None:
        """Take out a job whose deadline has passed."""
        self.num_jobs -= 1
        lane = self.lanes[job.is_high]
        lane[job.segment].remove(job)
        self._drop_empty(lane, job.segment)

    def _drop_empty(self, lane: dict[str, SegmentOrder[Item]], segment: str) -> None:
        if not lane[segment].num_jobs:
            del lane[segment]
            if not self._is_waiting(segment):
                self.shares.wait_no_more(segment)

    def take_measured(self, lane: LaneKey) -> WaitingJob[Item]:
        self.owed = max(0.0, self.owed - 1)
        job = heappop(self.measured[lane])[1]
        job.is_waiting = False
        if not self.measured[lane]:
            del self.measured[lane]
        self.num_jobs -= 1
        return job

    def discard(self, unwanted: Callable[[Item], bool]) -> list[WaitingJob[Item]]:
        jobs = [job for heap in self.measured.values() for _, job in heap]
        jobs += [job for lane in self.lanes.values() for traffic in lane.values() for job in traffic.waiting()]
        if gone := [job for job in jobs if unwanted(job.item)]:
            left = {id(job) for job in gone}
            segments = {segment for lane in self.lanes.values() for segment in lane}
            for lane in self.lanes.values():
                lane.clear()
            self.measured.clear()
            self.num_jobs = 0
            for job in jobs:
                if id(job) in left:
                    job.is_waiting = False
                else:
                    self._put(job)
            for segment in segments:
                if not self._is_waiting(segment):
                    self.shares.wait_no_more(segment)
        return gone

    def _is_waiting(self, segment: str) -> bool:
        return segment in self.lanes[True] or segment in self.lanes[False]

    @property
    def _is_normal_due(self) -> bool:
        return self.owed >= 1 - _ROUNDING

    @property
    def _is_high_next(self) -> bool:
        return bool(self.lanes[True]) and not (self._is_normal_due and self.lanes[False])

    def _next_segment(self, lane: Mapping[str, SegmentOrder[Item]], shared: SharedPrefixes, now: float) -> str:
        """Whose turn it is: the least-served's, but for the lead of the one served last."""
        rival = self.shares.least_served(lane)
        assert rival is not None  # noqa: S101 - the caller sees to it that the lane has jobs
        last = self.served_last
        if last is None or last == rival or last not in lane or not shared.held:
            return rival
        num_shared = lane[last].next(shared, self.shares.expected_job_s(last), now)[1]
        ahead_s = self.shares.ahead_s(last, rival)
        return last if ahead_s <= shared.lead_s(num_shared) else rival
