"""Jobs whose partition goes to another worker: those that have not started go back at once, overdue ones as well."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from worker.jobs.claiming import ClaimedJob
from worker.running import RunningJobs

if TYPE_CHECKING:
    from worker.loop import Worker

log = logging.getLogger(__name__)


class MovedJobs:
    """Looks once after each change of the assignment. One thread uses it, the loop's."""

    def __init__(self, worker: Worker, running: RunningJobs) -> None:
        self._c = worker
        self._running = running
        self._assignment = -1

    def give_back(self) -> int:
        """Give these jobs back, none of them counted as tried; returns how many."""
        intake = self._c.intake
        if intake.assignment_number == self._assignment:
            return 0
        self._assignment = intake.assignment_number
        staying, moved = self._split(self._c.feed.ready.take_all())
        self._c.feed.ready.put_back(staying)
        staying_alone, moved_alone = self._split(self._running.take_waiting_alone())
        self._running.run_alone_later(staying_alone)
        moved += moved_alone
        overdue = intake.handing_over.take_overdue()
        running = self._running.by_id().items()
        moved += self._running.drop([job_id for job_id, job in running if job.claimed.ready.delivery.key in overdue])
        if moved:
            told = {"action": "jobs_moved", "num_jobs": len(moved)}
            log.info("jobs of partitions that another worker takes over are given back", extra=told)
            self._c.release(moved)
            self._c.feed.ended([one.ready.lane for one in moved])
        return len(moved)

    def _split(self, claimed: Iterable[ClaimedJob]) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        """Jobs of partitions that stay, and jobs of partitions that leave.

        The intake is asked once for each job: the thread that polls may change the answer at any moment, and a job
        that is neither kept nor given back would be lost until its lease runs out.
        """
        staying: list[ClaimedJob] = []
        moved: list[ClaimedJob] = []
        for one in claimed:
            (staying if self._c.intake.is_current(one.ready.delivery) else moved).append(one)
        return staying, moved
