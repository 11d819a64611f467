"""A task's device time so far, and the expected device time of its next job. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

NUM_REMEMBERED_JOBS: Final = 64  #: the mean device time of a job follows about this many ended jobs
SHORTEST_JOB_S: Final = 0.001  #: no job is expected to take less, so that many free jobs still count for something


class DeviceShare:
    """The virtual time of one task in start-time fair queueing (Goyal, Vin and Cheng, 1996).

    The virtual time is device seconds over weight. Device seconds are known only after a step, so an admitted job
    counts with its expected device seconds until real ones take their place. Device time beyond a task's share is
    subtracted from its next turn, as in deficit round robin (Shreedhar and Varghese, 1995).

    The device seconds of a step are split evenly over the task's running jobs. Which job ended is not known here, so
    the oldest one is taken. The mean over jobs does not depend on that choice (Little, 1961).
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.virtual_s = 0.0  #: charged device seconds over weight
        self.mean_job_s: float | None = (
            None  #: exponentially weighted mean of device seconds a job; None before one ended
        )
        self._num_ended = 0
        self._expected_s = 0.0  # device seconds that running jobs are expected to need and were not charged
        self._per_job_s = 0.0  # device seconds that a job running since the beginning would have had
        self._began_at_s: deque[float] = deque()  # `_per_job_s` when each running job began

    @property
    def num_running(self) -> int:
        """Jobs admitted and, as far as is known, not ended."""
        return len(self._began_at_s)

    @property
    def finish_s(self) -> float:
        """The virtual time that is expected once the running jobs have ended."""
        return self.virtual_s + self._expected_s / self.weight

    def admit(self, expected_s: float) -> None:
        """Count a job that begins to run, with the device seconds that it is expected to need."""
        self._expected_s += expected_s
        self._began_at_s.append(self._per_job_s)

    def charge(self, device_s: float) -> None:
        """Count device seconds that the running jobs had."""
        self.virtual_s += device_s / self.weight
        self._expected_s -= min(device_s, self._expected_s)
        self._per_job_s += device_s / max(1, self.num_running)

    def observe(self, num_running: int) -> None:
        """Take the number of jobs that still run; ended jobs update the mean and count no expected seconds."""
        while self.num_running > num_running:
            self._learn(self._per_job_s - self._began_at_s.popleft())
        while self.num_running < num_running:
            self._began_at_s.append(self._per_job_s)
        if self.mean_job_s is not None:
            self._expected_s = min(self._expected_s, num_running * max(SHORTEST_JOB_S, self.mean_job_s))

    def _learn(self, device_s: float) -> None:
        self._num_ended += 1
        mean = self.mean_job_s or 0.0
        self.mean_job_s = mean + (device_s - mean) / min(self._num_ended, NUM_REMEMBERED_JOBS)
