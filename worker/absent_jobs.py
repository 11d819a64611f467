"""Jobs in the engine whose servers are all away: they wait there, and nobody else waits for their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.running import RunningJobs

if TYPE_CHECKING:
    from worker.loop import Worker


class AbsentJobs:
    """Looks once a turn. One thread uses it, the loop's."""

    def __init__(self, worker: Worker, running: RunningJobs) -> None:
        self._c = worker
        self._running = running

    def set_aside(self) -> int:
        """Tell the feed of these jobs; returns how many were given back.

        They go back where a job waits until this worker has no other claim. None of them counts as tried.
        """
        absent = self._running.absent()
        self._c.feed.set_aside({job.job_id: job.lane for job in absent})
        if not absent or not self._c.feed.num_suspects:
            return 0
        left = self._running.drop([job.job_id for job in absent])
        self._c.feed.set_aside({})
        self._c.release(left)
        self._c.feed.put_back([one.ready for one in left if self._c.intake.is_current(one.ready.delivery)])
        self._c.feed.ended([one.ready.lane for one in left])
        return len(left)
