"""How long jobs take from their turn to their end at today's load, learned from those that ended. Pure.

A job's turn is its claim. Then it waits among the jobs that were claimed ahead, and its text is decoded:

    service = wait ahead + seconds a token * min(output tokens, limit)

Output tokens are the mean of the task's jobs and `MARGIN_SD` standard deviations, because a job that is started too
late wastes the device time of one that could have ended. All means fade with `NUM_REMEMBERED` jobs, so seconds a token
follow the load, and drafts.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

NUM_REMEMBERED: Final = 32  #: ended jobs of a task that its means follow
MARGIN_SD: Final = 2.0  #: standard deviations of a task's output lengths that a job is expected to be longer


class _Means(NamedTuple):
    """Fading sums over ended jobs."""

    num_jobs: float = 0.0
    num_tokens: float = 0.0
    squared_tokens: float = 0.0
    wall_s: float = 0.0
    ahead_s: float = 0.0  #: between claim and start

    def after(self, num_tokens: int, wall_s: float, ahead_s: float) -> _Means:
        kept = 1 - 1 / NUM_REMEMBERED
        return _Means(
            kept * self.num_jobs + 1,
            kept * self.num_tokens + num_tokens,
            kept * self.squared_tokens + num_tokens**2,
            kept * self.wall_s + wall_s,
            kept * self.ahead_s + ahead_s,
        )

    @property
    def long_tokens(self) -> float:
        """The mean length with its margin."""
        mean = self.num_tokens / self.num_jobs
        return mean + MARGIN_SD * math.sqrt(max(0.0, self.squared_tokens / self.num_jobs - mean**2))


class ServiceTimes:
    """Expected seconds of service by task. One thread counts, any may ask. Of a new task, the means are all tasks'."""

    def __init__(self) -> None:
        self._all = _Means()
        self._by_task: dict[str, _Means] = {}

    def ended(self, task: str, *, num_tokens: int, wall_s: float, ahead_s: float) -> None:
        """Count a job whose text ended: its output tokens, its decoding, and its wait between claim and start."""
        tokens = max(1, num_tokens)
        self._all = self._all.after(tokens, wall_s, ahead_s)
        self._by_task[task] = self._by_task.get(task, _Means()).after(tokens, wall_s, ahead_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds of decoding a job, over all tasks; None before any job has ended."""
        return self._all.wall_s / self._all.num_jobs if self._all.num_jobs else None

    def expected_s(self, task: str, max_tokens: int) -> float:
        """Seconds from turn to end of a job whose output is at most `max_tokens` long; 0 before any job has ended."""
        if not self._all.num_jobs:
            return 0.0
        means = self._by_task.get(task, self._all)
        decode_s = means.wall_s / means.num_tokens * min(means.long_tokens, max_tokens)
        return self._all.ahead_s / self._all.num_jobs + decode_s
