"""How many jobs are claimed before the engine has room for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

#: Jobs claimed ahead last for so long where jobs are short: a claim costs a transaction, whatever its number of jobs.
AHEAD_S: Final = 0.1
#: However short jobs are.
MOST_AHEAD: Final = 512


class Ahead:
    """`least`, or as many as were claimed within the last AHEAD_S: claims follow the rate at which jobs start."""

    def __init__(self, least: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._clock = clock
        self._claimed: deque[tuple[float, int]] = deque()
        self._num_claimed = 0

    @property
    def most(self) -> int:
        """What `wanted` never exceeds."""
        return max(self._least, MOST_AHEAD)

    def claimed(self, num_jobs: int) -> None:
        """So many jobs were claimed now."""
        self._claimed.append((self._clock(), num_jobs))
        self._num_claimed += num_jobs

    def wanted(self) -> int:
        """How many jobs should be ready when claims are done."""
        begin = self._clock() - AHEAD_S
        while self._claimed and self._claimed[0][0] < begin:
            self._num_claimed -= self._claimed.popleft()[1]
        return max(self._least, min(self._num_claimed, MOST_AHEAD))
