"""The jobs that wait in line for their claim. The feed adds and takes them; the loop charges tasks and ends jobs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from worker.intake.validation import ReadyJob
from worker.jobs.admission import AdmissionQueue, Waiting
from worker.jobs.beginnings import beginnings_of
from worker.jobs.lanes import LaneKey
from worker.jobs.waiting import Load


class JobLine:
    """A queue of admission, with the count of jobs by lane that were taken out and have not ended."""

    def __init__(self, queue: AdmissionQueue[ReadyJob], clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._lock = threading.Lock()  # of the queue and of the counts below
        self._charged: Counter[str] = Counter()
        self._taken: Counter[LaneKey] = Counter()
        self._aside: Counter[LaneKey] = Counter()  # of those that were taken, jobs that nobody has to wait for

    def __len__(self) -> int:
        with self._lock:
            return len(self._queue)

    def by_task(self) -> Mapping[str, Waiting]:
        """By task, how many jobs wait, and the age of the oldest."""
        with self._lock:
            return self._queue.waiting(self._clock())

    def loads(self) -> tuple[Load, Load]:
        """What waits in the high lanes, and what waits in the others."""
        with self._lock:
            high = self._queue.high
            return high, Load(len(self._queue) - high.num_jobs, self._queue.num_bytes - high.num_bytes)

    def add(self, jobs: Iterable[ReadyJob]) -> None:
        """Let jobs wait, beginning now."""
        now = self._clock()
        with self._lock:
            for job in jobs:
                self._queue.add(
                    job.lane,
                    job,
                    priority=job.job.priority,
                    num_bytes=job.num_bytes,
                    now=now,
                    beginnings=beginnings_of(job.prepared.token_ids),
                    is_high=job.is_high,
                )

    def take(self, limit: int, is_ours: Callable[[str], bool]) -> tuple[list[ReadyJob], list[ReadyJob]]:
        """Take out up to `limit` jobs: those to claim, and other deliveries of jobs that are ours already.

        `is_ours` is asked by job_id. Only the jobs to claim count as taken.
        """
        with self._lock:
            self._queue.charge(self._charged)
            self._charged.clear()
            batch = [job for _, job in self._queue.next(limit, running=self._taken - self._aside)] if limit else []
            again = {number for number, job in enumerate(batch) if is_ours(job.job.job_id)}
            new = [job for number, job in enumerate(batch) if number not in again]
            self._taken.update(job.lane for job in new)
        return new, [batch[number] for number in sorted(again)]

    def count(self, job: ReadyJob) -> None:
        """Count a job as taken that did not wait in line."""
        with self._lock:
            self._taken[job.lane] += 1

    def ended(self, lanes: Iterable[LaneKey]) -> None:
        """Jobs of these lanes that were taken have ended, or were given back."""
        with self._lock:
            self._taken.subtract(lanes)

    def set_aside(self, lanes: Iterable[LaneKey]) -> bool:
        """Of the jobs taken, those of these lanes do not run for now. Whether they are others than before."""
        aside = Counter(lanes)
        with self._lock:
            is_other = aside != self._aside
            self._aside = aside
        return is_other

    def charge(self, device_s_by_task: Mapping[str, float]) -> None:
        """Count the device time of an engine step, by task."""
        with self._lock:
            self._charged.update(device_s_by_task)

    def discard(self, unwanted: Callable[[ReadyJob], bool]) -> None:
        """Drop the waiting jobs for which `unwanted` holds."""
        with self._lock:
            self._queue.discard(unwanted)
