"""How long jobs take from their turn to their end at today's load, learned from those that ended. Pure.

A job's turn is its claim. Then it waits among the jobs that were claimed ahead, and its text is decoded:

    service = wait ahead + seconds a token * min(output tokens, limit)

Output tokens are the mean of the task's jobs and `MARGIN_SD` standard deviations, because a job that is started too
late wastes the device time of one that could have ended. All means fade with `NUM_REMEMBERED` jobs, so seconds a token
follow the load, and drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

NUM_REMEMBERED: Final = 32  #: ended jobs of a task that its means follow
_KEPT: Final = 1 - 1 / NUM_REMEMBERED
MARGIN_SD: Final = 2.0  #: standard deviations of a task's output lengths that a job is expected to be longer


@dataclass(slots=True)
class _Means:
    """Fading sums over ended jobs."""

    num_jobs: float = 0.0
    num_tokens: float = 0.0
    squared_tokens: float = 0.0
    wall_s: float = 0.0
    ahead_s: float = 0.0  #: between claim and start

    def add(self, num_tokens: int, wall_s: float, ahead_s: float) -> None:
        self.num_tokens = _KEPT * self.num_tokens + num_tokens
        self.squared_tokens = _KEPT * self.squared_tokens + num_tokens * num_tokens
        self.wall_s = _KEPT * self.wall_s + wall_s
        self.ahead_s = _KEPT * self.ahead_s + ahead_s
        # The last: a thread that asks meanwhile divides by no sum that is still 0.
        self.num_jobs = _KEPT * self.num_jobs + 1

    @property
    def long_tokens(self) -> float:
        """The mean length with its margin."""
        mean = self.num_tokens / self.num_jobs
        return mean + MARGIN_SD * math.sqrt(max(0.0, self.squared_tokens / self.num_jobs - mean**2))


class ServiceTimes:
    """Expected seconds of service by task. One thread counts, any may ask. A new task has the means of all."""

    def __init__(self) -> None:
        self._all = _Means()
        self._by_task: dict[str, _Means] = {}

    def ended(self, task: str, *, num_tokens: int, wall_s: float, ahead_s: float) -> None:
        """Count a job whose text ended: its output tokens, its decoding, and its wait between claim and start."""
        if (means := self._by_task.get(task)) is None:
            means = self._by_task[task] = _Means()
        for sums in (self._all, means):
            sums.add(max(1, num_tokens), wall_s, ahead_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds of decoding a job, over all tasks; None before any job has ended."""
        return self._all.wall_s / self._all.num_jobs if self._all.num_jobs else None

    def expected_s(self, task: str, max_tokens: int) -> float:
        """Seconds from turn to end of a job whose output is at most `max_tokens` long; 0 before any job has ended."""
        if not self._all.num_jobs:
            return 0.0
        means = self._by_task.get(task)
        if means is None or not means.num_jobs:
            means = self._all
        decode_s = means.wall_s / means.num_tokens * min(means.long_tokens, max_tokens)
        return self._all.ahead_s / self._all.num_jobs + decode_s
