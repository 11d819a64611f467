"""Which waiting job is admitted next: tasks share the device by device time, grouped in the order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Final, Generic, TypeVar

from worker.jobs.beginnings import Beginning, HeldBeginnings, SharingSlack
from worker.jobs.lanes import LaneKey, lane_of
from worker.jobs.measured import MeasuredTurns
from worker.jobs.order import TaskOrder
from worker.jobs.shares import SHORTEST_JOB_S, DeviceShare
from worker.jobs.task_jobs import TaskJobs
from worker.jobs.waiting import Load, WaitingJob

__all__ = ["AdmissionQueue", "LaneKey", "Waiting", "lane_of"]

Item = TypeVar("Item")

UNKNOWN_JOB_S: Final = 1.0  #: device seconds that a job is expected to need before any job of any task has ended


@dataclass(frozen=True, slots=True)
class Waiting:
    """What an operator sees of a task's queue."""

    num_jobs: int
    oldest_s: float  #: how long the job that was added first has waited


@dataclass(slots=True)
class _Task(Generic[Item]):
    name: str
    jobs: TaskJobs[Item]
    share: DeviceShare = field(default_factory=DeviceShare)


class AdmissionQueue(Generic[Item]):
    """The waiting jobs of a worker. Time is whatever clock the caller counts seconds with.

    Between tasks: the task that had the least device time over weight goes next (start-time fair queueing, Goyal, Vin
    and Cheng, 1996). The task served last goes on until it is more than `quantum_s` of weighted device time ahead, the
    quantum of deficit round robin (Shreedhar and Varghese, 1995), so that jobs of one task run together. A task whose
    queue was empty starts at the least virtual time of the tasks with waiting jobs, because an idle task must not save
    up device time.

    Within a task: jobs of the high lane first, but for `normal_share` of the starts; within a lane by priority, where
    `ageing_s` of waiting are worth one step, and then by arrival.

    Jobs whose prompts begin alike save the device time in which that beginning is read, as long as they run together.
    So a job may overtake others of its task, and its task may go on beyond the quantum, up to `SharingSlack`.

    Probes and controls are compared by their times, so each of their lanes runs alone, see `MeasuredTurns`.
    """

    def __init__(
        self,
        *,
        measured_batch: int,
        quantum_s: float = 1.0,
        ageing_s: float = 10.0,
        normal_share: float = 0.2,
        weight_of: Callable[[str], float] = lambda task: 1.0,
        read_s: Callable[[int], float] = lambda num_tokens: 0.0,
        most_slack_s: float = 0.0,
    ) -> None:
        """An empty queue.

        Args:
            measured_batch: jobs of a measured lane admitted in one turn; the engine's number of slots.
            quantum_s: device seconds over weight that a task may be ahead of the task that had least.
            ageing_s: seconds of waiting that are worth one step of priority.
            normal_share: of a task's starts, for jobs that are not of the high lane, while some of both lanes wait.
            weight_of: the weight of a task, above 0; asked whenever the task is charged, so weights may change.
            read_s: device seconds in which the target reads so many tokens of a prompt, as measured.
            most_slack_s: device seconds by which jobs may go before their turn to share a beginning; 0: never.
        """
        self._quantum_s = quantum_s
        self._ageing_s = ageing_s
        self._normal_share = normal_share
        self._weight_of = weight_of
        self._slack = SharingSlack(read_s, most_slack_s)
        self._held = HeldBeginnings(measured_batch)
        self._tasks: dict[str, _Task[Item]] = {}
        self._backlogged: dict[str, _Task[Item]] = {}
        self._running: set[str] = set()
        self._served_last: str | None = None
        self._most_charged_s = 0.0
        self._mean_over_tasks_s: float | None = None  # of device seconds a job; None until needed
        self._turns = MeasuredTurns(measured_batch)
        self._arrival = count()
        self._num_bytes = 0
        self._high = Load()

    def __len__(self) -> int:
        return sum(task.jobs.num_jobs for task in self._backlogged.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting jobs, as given to `add`."""
        return self._num_bytes

    @property
    def high(self) -> Load:
        """What of it waits in the high lanes."""
        return self._high

    def waiting(self, now: float) -> Mapping[str, Waiting]:
        """How many jobs wait and for how long, by task; tasks without a waiting job are left out."""
        return {
            name: Waiting(task.jobs.num_jobs, now - task.jobs.oldest_since_s)
            for name, task in sorted(self._backlogged.items())
        }

    def add(
        self,
        lane: LaneKey,
        item: Item,
        *,
        priority: int,
        num_bytes: int,
        now: float,
        beginnings: tuple[Beginning, ...] = (),
        is_high: bool = False,
    ) -> None:
        """Let a job wait; `now` is when its waiting began, `beginnings` are its prompt's, the longest first.

        `is_high`: it is of the high lane. Probes and controls never are.
        """
        task = self._task(lane.task)
        if not task.jobs.num_jobs:
            charged_s = (other.share.virtual_s for other in self._backlogged.values())
            task.share.virtual_s = max(task.share.virtual_s, min(charged_s, default=self._most_charged_s))
            self._backlogged[task.name] = task
        place = (now - priority * self._ageing_s, next(self._arrival))
        is_high = is_high and not lane.is_measured
        job = WaitingJob(lane, item, num_bytes, now, () if self._slack.is_none else beginnings, is_high)
        task.jobs.add(place, job)
        self._count(job, 1)

    def next(self, limit: int, *, running: Mapping[LaneKey, int]) -> list[tuple[LaneKey, Item]]:
        """Take out the jobs that are admitted now, in their order; none where none may be.

        Args:
            limit: the most jobs to take out.
            running: how many jobs taken out before have not ended, by lane. Jobs that are still being claimed count.
        """
        self._observe(running)
        lanes = {lane for lane, num_running in running.items() if num_running > 0}
        if self._turns.end_if_over(lanes, lambda task: self._tasks[task].jobs.measured_lanes()):
            self._served_last = None
        taken = self._take_traffic(limit)
        if not taken:
            taken = self._take_measured(limit, lanes)
        return [(job.lane, job.item) for job in taken]

    def charge(self, device_s_by_task: Mapping[str, float]) -> None:
        """Count the device seconds of an engine step, by task."""
        for name, device_s in device_s_by_task.items():
            share = self._task(name).share
            share.weight = self._weight(name)
            share.charge(device_s)
            self._most_charged_s = max(self._most_charged_s, share.virtual_s)

    def discard(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out and return the jobs for which `unwanted` holds (their partition went to another worker). O(n)."""
        gone = [job for task in self._backlogged.values() for job in task.jobs.discard(unwanted)]
        self._backlogged = {name: task for name, task in self._backlogged.items() if task.jobs.num_jobs}
        for job in gone:
            self._count(job, -1)
        return [job.item for job in gone]

    def _take_traffic(self, limit: int) -> list[WaitingJob[Item]]:
        """Traffic up to `limit`, or up to where a measured lane is next: its turn begins there."""
        taken: list[WaitingJob[Item]] = []
        if limit <= 0 or self._turns.is_open:
            return taken
        tasks = self._backlogged
        if self._turns.num_traffic_first:
            tasks = {name: task for name, task in tasks.items() if task.jobs.has_traffic} or tasks
        may_measure = tasks is self._backlogged
        shares = {name: task.share for name, task in tasks.items()}
        order = TaskOrder(shares, self._served_last, self._quantum_s, self._slack_s)
        while len(taken) < limit and (name := order.next()) is not None:
            task = self._tasks[name]
            if may_measure and task.jobs.is_measured_first():
                self._turns.begin(task.jobs.measured_lanes())
                break
            job_s = self._expected_job_s(task.share)
            taken.append(self._admit(task, task.jobs.take_traffic(self._held, self._slack, job_s)))
            if not (task.jobs.num_jobs if may_measure else task.jobs.has_traffic):
                order.leave()
        self._turns.count_traffic(len(taken))
        return taken

    def _take_measured(self, limit: int, running: Set[LaneKey]) -> list[WaitingJob[Item]]:
        """Jobs of the lane whose turn it is, once no other lane runs."""
        lane = self._turns.admitted(running)
        if lane is None:
            return []
        task = self._tasks[lane.task]
        num_jobs = max(0, min(limit, self._turns.num_left, task.jobs.num_measured(lane)))
        self._turns.count(num_jobs)
        return [self._admit(task, task.jobs.take_measured(lane)) for _ in range(num_jobs)]

    def _admit(self, task: _Task[Item], job: WaitingJob[Item]) -> WaitingJob[Item]:
        task.share.admit(self._expected_job_s(task.share))
        self._held.admit(job.beginnings)
        self._served_last = task.name
        self._running.add(task.name)
        self._count(job, -1)
        if not task.jobs.num_jobs:
            del self._backlogged[task.name]
        return job

    def _count(self, job: WaitingJob[Item], sign: int) -> None:
        self._num_bytes += sign * job.num_bytes
        if job.is_high:
            self._high = Load(self._high.num_jobs + sign, self._high.num_bytes + sign * job.num_bytes)

    def _observe(self, running: Mapping[LaneKey, int]) -> None:
        num_running: Counter[str] = Counter()
        for lane, num_jobs in running.items():
            num_running[lane.task] += num_jobs
        for name in self._running | num_running.keys():
            self._task(name).share.observe(num_running[name])
        self._held.observe(num_running.total())
        self._running = set(num_running)
        self._mean_over_tasks_s = None

    def _slack_s(self, name: str) -> float:
        task = self._tasks[name]
        return self._slack.of(task.jobs.num_shared(self._held, self._slack, self._expected_job_s(task.share)))

    def _expected_job_s(self, share: DeviceShare) -> float:
        if share.mean_job_s is not None:
            return max(SHORTEST_JOB_S, share.mean_job_s)
        if self._mean_over_tasks_s is None:
            means_s = (task.share.mean_job_s for task in self._tasks.values())
            known_s = [mean_s for mean_s in means_s if mean_s is not None]
            self._mean_over_tasks_s = max(SHORTEST_JOB_S, fmean(known_s)) if known_s else UNKNOWN_JOB_S
        return self._mean_over_tasks_s

    def _task(self, name: str) -> _Task[Item]:
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = _Task(name, TaskJobs(self._normal_share))
            task.share.weight = self._weight(name)
        return task

    def _weight(self, name: str) -> float:
        weight = self._weight_of(name)
        if weight <= 0:
            raise ValueError(f"task {name} has weight {weight}; a weight is above 0")
        return weight
