"""Who orders the week's jobs: production's admission, the same without slack, first come, and two clairvoyants."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Final, Protocol

from alphaloop.kafka.offsets import Record
from benchmarks.week.device import Decoding
from benchmarks.week.world import NUM_SLOTS, SEGMENT_WEIGHTS, Week, WeekJob, fastest_ms
from worker.admission import AdmissionQueue, Line
from worker.feed import LEAST_AHEAD, Unread, num_soon
from worker.intake.partitions import Delivery
from worker.intake.polling import MAX_BUFFERED, MAX_WATERMARK_DISTANCE
from worker.ordering.service_times import ServiceTimes
from worker.ordering.sharing import FairShares

LEAST_PARTITIONS: Final = 4  #: of each topic
MAX_UNREAD_BYTES: Final = 64_000_000  #: worker.max_buffered_bytes
FETCHED: Final = 1000  #: records of a partition at once: a consumer's max.partition.fetch.bytes, of records of 1 KB


class Admission(Protocol):
    """Orders the jobs of one worker."""

    def turn(self, running: Counter[Line], num_free: int, now_s: float) -> tuple[list[WeekJob], list[WeekJob]]:
        """Jobs to start, at most `num_free`, and jobs whose deadlines passed while they waited."""

    def charge(self, device_s: Mapping[Line, float]) -> None:
        """Device seconds by line."""

    def ended(self, ended: Iterable[Decoding], now_s: float) -> None:
        """Jobs that ended in the device, or expired there."""


@dataclass(slots=True, eq=False)
class Sent:
    """A record of a job."""

    job: WeekJob
    is_claimed: bool = False
    is_finished: bool = False


class Log:
    """Partitions, as Kafka keeps them: records in the order of arrival, and which of them are claimed and finished.

    Each topic has one for every worker at least, as in a real installation: a worker without a partition gets nothing.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_partitions = max(LEAST_PARTITIONS, num_workers)
        self.partitions: defaultdict[tuple[str, int], list[Sent]] = defaultdict(list)
        self._newest: dict[int, Sent] = {}

    def append(self, job: WeekJob) -> None:
        """A producer's message, or a job whose claim ended with its worker."""
        topic = f"jobs.{job.lane.task}" + (".high" if job.stream.is_high else "")
        self._newest[job.number] = sent = Sent(job)
        self.partitions[topic, self.partition_of(job)].append(sent)

    def partition_of(self, job: WeekJob) -> int:
        """Where its records are, in the topic of its task."""
        return job.number % self.num_partitions

    def claim(self, job: WeekJob) -> None:
        """No other worker decodes it."""
        self._newest[job.number].is_claimed = True

    def finish(self, job: WeekJob) -> None:
        """Its record need never be read again."""
        self._newest[job.number].is_finished = True


class WorkerAdmission:
    """The worker's own parts: what it polls, reads unread by turns, orders, and claims ahead.

    `knows`: what the order is made from: "slack", "priority" (as before slack), or "arrival" (first come).
    """

    def __init__(self, log: Log, mine: Sequence[int], knows: str) -> None:
        self._log, self._mine, self._knows = log, frozenset(mine), knows
        self._position: dict[tuple[str, int], int] = {}
        self._low: dict[tuple[str, int], int] = {}
        self._unread = {True: Unread(MAX_UNREAD_BYTES), False: Unread(MAX_UNREAD_BYTES)}
        self._service = ServiceTimes()
        self.queue: AdmissionQueue[WeekJob] = AdmissionQueue(
            num_slots=NUM_SLOTS,
            weight_of_segment=lambda segment: SEGMENT_WEIGHTS[segment],
            service_s=lambda lane, job: self._service.expected_s(lane.task, 4096),
        )
        self._ready: deque[tuple[float, WeekJob]] = deque()
        self._waited_s: dict[int, float] = {}

    def take_over(self, mine: Sequence[int]) -> None:
        """The group's assignment changed; new partitions are read from their low watermarks."""
        self._mine = frozenset(mine)
        for where in [where for where in self._position if where[1] not in self._mine]:
            del self._position[where], self._low[where]
        self.queue.discard(lambda job: self._log.partition_of(job) not in self._mine)
        for unread in self._unread.values():
            unread.discard(lambda delivery: delivery.record.partition not in self._mine)

    def claimed(self) -> list[WeekJob]:
        """Jobs that wait to start."""
        return [job for _, job in self._ready]

    def turn(self, running: Counter[Line], num_free: int, now_s: float) -> tuple[list[WeekJob], list[WeekJob]]:
        """As `JobFeed.turn`, then as the loop's start."""
        self._poll()
        start: list[WeekJob] = []
        expired: list[WeekJob] = []
        while True:
            self._read(now_s)
            num_running = running.total() + len(start)
            wanted = min(max(LEAST_AHEAD, NUM_SLOTS), num_soon(NUM_SLOTS, num_running, self._service.decode_s))
            if 2 * len(self._ready) <= wanted:
                taken = running + Counter(_line(job) for _, job in self._ready) + Counter(map(_line, start))
                limit = wanted - len(self._ready)
                for _, job in self.queue.next(limit, running=taken, now=now_s):
                    self._log.claim(job)
                    self._ready.append((now_s, job))
            if not self._ready or len(start) >= num_free:
                return start, expired
            at_s, job = self._ready.popleft()
            if job.deadline_s <= now_s:
                expired.append(job)
                self._log.finish(job)
            else:
                self._waited_s[job.number] = now_s - at_s
                start.append(job)

    def charge(self, device_s: Mapping[Line, float]) -> None:
        """To the queue."""
        self.queue.charge(device_s)

    def ended(self, ended: Iterable[Decoding], now_s: float) -> None:
        """Service times learn of texts, partitions of every end."""
        for each in ended:
            job = each.job
            ahead_s = self._waited_s.pop(job.number)
            if not job.is_expired:
                wall_s = now_s - each.started_s
                self._service.ended(job.lane.task, num_tokens=job.num_tokens, wall_s=wall_s, ahead_s=ahead_s)
            self._log.finish(job)

    def _poll(self) -> None:
        """Some records of each partition in turn, as a consumer fetches a backlog."""
        mine = [where for where in self._log.partitions if where[1] in self._mine]
        while mine:
            mine = [where for where in mine if self._fetch(where, self._log.partitions[where])]

    def _fetch(self, where: tuple[str, int], records: Sequence[Sent]) -> bool:
        """The next records of a partition. Returns whether there may be more to fetch now."""
        low, position = self._low.get(where, 0), self._position.get(where, 0)
        while low < len(records) and records[low].is_finished:
            low += 1
        self._low[where] = low
        position = max(position, low)
        deliveries = []
        unread = self._unread[where[0].endswith(".high")]
        num_wanted = FETCHED if unread.room_bytes > 0 else 0
        end = min(len(records), position + num_wanted, low + MAX_WATERMARK_DISTANCE)
        for offset in range(position, end):
            if not records[offset].is_claimed:
                deliveries.append(_delivery(where, offset, records[offset].job))
        self._position[where] = end
        unread.put(deliveries)
        return end == position + FETCHED

    def _read(self, now_s: float) -> None:
        for is_high, unread in self._unread.items():
            room = MAX_BUFFERED - self.queue.load(is_high=is_high)[0]
            if room <= 0 or not unread:
                continue
            turns = unread.take(partial(self.queue.num_waiting, is_high=is_high))
            for _ in range(room):
                if (delivery := next(turns, None)) is None:
                    break
                record = delivery.record
                self._add(self._log.partitions[record.topic, record.partition][record.offset].job, now_s)

    def _add(self, job: WeekJob, now_s: float) -> None:
        stream = job.stream
        self.queue.add(
            job.lane,
            job,
            priority=0 if self._knows == "arrival" else stream.priority,
            num_bytes=1000,
            now=now_s,
            is_high=stream.is_high,
            segment=stream.segment,
            deadline_s=job.deadline_s if self._knows == "slack" else math.inf,
        )


def _line(job: WeekJob) -> Line:
    return Line(job.lane, job.stream.segment)


def _delivery(where: tuple[str, int], offset: int, job: WeekJob) -> Delivery:
    fields = {"segment": job.stream.segment, "deadline": "" if job.deadline_s < math.inf else None}
    value = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
    return Delivery(Record(*where, offset, None, value, (), int(1000 * job.at_s)), 1)


@dataclass(slots=True)
class _Known:
    """Waiting jobs of one segment."""

    heap: list[tuple[float, int, WeekJob]] = field(default_factory=list)
    late: list[tuple[int, WeekJob]] = field(default_factory=list)
    num_jobs: int = 0


class Clairvoyant:
    """Knows every length and orders all workers' jobs in one queue; the same shares, non-preemptive.

    `by_slack`: least slack first; otherwise the earliest deadline. Jobs that cannot make it come last.
    """

    def __init__(self, week: Week, *, by_slack: bool) -> None:
        self._week, self._by_slack = week, by_slack
        self._lines: defaultdict[tuple[str, str], _Known] = defaultdict(_Known)
        self._by_deadline: list[tuple[float, int, WeekJob]] = []
        self._waiting: set[int] = set()
        self._tasks = FairShares(lambda task: 1.0, lambda: 1.0)
        self._segments: dict[str, FairShares] = {}
        self._taken: Counter[Line] = Counter()

    def append(self, job: WeekJob) -> None:
        """A job comes."""
        task, segment = job.lane.task, job.stream.segment
        segments = self._segments.setdefault(task, FairShares(SEGMENT_WEIGHTS.__getitem__, lambda: 1.0))
        if not self._waits(task):
            self._tasks.wait(task)
        line = self._lines[task, segment]
        if not line.num_jobs:
            segments.wait(segment)
        line.num_jobs += 1
        self._waiting.add(job.number)
        heappush(self._by_deadline, (job.deadline_s, job.number, job))
        heappush(line.heap, (self._latest_s(job, job.at_s) if self._by_slack else job.deadline_s, job.number, job))

    def turn(self, running: Counter[Line], num_free: int, now_s: float) -> tuple[list[WeekJob], list[WeekJob]]:
        """The next of the least-served segment of the least-served task."""
        start: list[WeekJob] = []
        expired: list[WeekJob] = []
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            job = heappop(self._by_deadline)[-1]
            if job.number in self._waiting:
                self._leave(job)
                expired.append(job)
        self._observe()
        while len(start) < num_free:
            if (
                task := self._tasks.least_served(sorted({t for (t, _), line in self._lines.items() if line.num_jobs}))
            ) is None:
                break
            names = sorted(segment for (name, segment), line in self._lines.items() if name == task and line.num_jobs)
            segment = self._segments[task].least_served(names)
            assert segment is not None
            job = self._first(self._lines[task, segment], now_s)
            self._leave(job)
            self._tasks.admit(task)
            self._segments[task].admit(segment)
            self._taken[_line(job)] += 1
            start.append(job)
        return start, expired

    def _first(self, line: _Known, now_s: float) -> WeekJob:
        while line.heap:
            job = line.heap[0][-1]
            is_late = self._latest_s(job, now_s) < now_s
            if job.number in self._waiting and not is_late:
                return job
            heappop(line.heap)
            if job.number in self._waiting:
                heappush(line.late, (job.number, job))
        while line.late[0][0] not in self._waiting:
            heappop(line.late)
        return line.late[0][-1]

    def _latest_s(self, job: WeekJob, now_s: float) -> float:
        decode_ms = job.num_tokens * fastest_ms(self._week.table, job.alpha) * self._week.slowness(now_s)
        return job.deadline_s - decode_ms / 1000

    def _leave(self, job: WeekJob) -> None:
        task, segment = job.lane.task, job.stream.segment
        self._waiting.discard(job.number)
        line = self._lines[task, segment]
        line.num_jobs -= 1
        if not line.num_jobs:
            self._segments[task].wait_no_more(segment)
        if not self._waits(task):
            self._tasks.wait_no_more(task)

    def _waits(self, task: str) -> bool:
        return any(line.num_jobs for (name, _), line in self._lines.items() if name == task)

    def _observe(self) -> None:
        by_task: Counter[str] = Counter()
        by_segment: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (lane, segment), number in self._taken.items():
            by_task[lane.task] += number
            by_segment[lane.task][segment] += number
        for task in self._tasks.observe(+by_task):
            self._segments[task].observe(+by_segment[task])

    def charge(self, device_s: Mapping[Line, float]) -> None:
        """To tasks and segments."""
        for (lane, segment), line_s in device_s.items():
            self._tasks.charge(lane.task, line_s)
            self._segments[lane.task].charge(segment, line_s)

    def ended(self, ended: Iterable[Decoding], now_s: float) -> None:
        """Frees their places."""
        self._taken.subtract(each.line for each in ended)
