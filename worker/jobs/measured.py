"""Turns of the measured lanes: probes and controls run alone, and those of a task follow each other. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set

from worker.jobs.lanes import CONTROL, PROBE, LaneKey


class MeasuredTurns:
    """Which measured lane has the device, if one has.

    A lane waits until the engine is empty, then runs alone for at most `batch` jobs. The other measured lanes of the
    task follow, each once, because times that are compared should meet the same machine. Controls and probes begin in
    turn. Afterwards `batch` jobs of traffic go first, as far as traffic waits.
    """

    def __init__(self, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"a turn of {batch} measured jobs; at least 1 is needed")
        self._batch = batch
        self._lane: LaneKey | None = None
        self._num_left = 0
        self._served: list[LaneKey] = []  # lanes that had a turn since traffic ran
        self._num_begun: Counter[str] = Counter()
        self._num_traffic_first = 0

    @property
    def is_open(self) -> bool:
        """Whether a lane has the device, or has it once the engine is empty."""
        return self._lane is not None

    @property
    def num_left(self) -> int:
        """How many jobs of the lane may still be admitted in this turn."""
        return self._num_left

    @property
    def num_traffic_first(self) -> int:
        """How many jobs of traffic go before the next turn."""
        return self._num_traffic_first

    def begin(self, lanes: Sequence[LaneKey]) -> None:
        """Give a task's measured lanes their turns; where the purpose in turn does not wait, the first lane begins."""
        task = lanes[0].task
        self._num_begun[task] += 1
        wanted = CONTROL if self._num_begun[task] % 2 else PROBE
        self._give(min((lane for lane in lanes if lane.purpose == wanted), default=lanes[0]))

    def end_if_over(self, running: Set[LaneKey], waiting_of: Callable[[str], Sequence[LaneKey]]) -> bool:
        """End a turn whose jobs were all admitted and have ended; True if traffic goes first now.

        Args:
            running: lanes with running jobs.
            waiting_of: the measured lanes of a task in which jobs wait.
        """
        if self._lane is None or self._lane in running:
            return False
        waiting = waiting_of(self._lane.task)
        if self._num_left and self._lane in waiting:
            return False
        following = [lane for lane in waiting if lane not in self._served]
        if following:
            self._give(min(following))
            return False
        self._lane, self._served, self._num_traffic_first = None, [], self._batch
        return True

    def admitted(self, running: Set[LaneKey]) -> LaneKey | None:
        """The lane of the turn, if no other lane runs."""
        return self._lane if self._lane is not None and running <= {self._lane} else None

    def count(self, num_jobs: int) -> None:
        """Count jobs of the lane that were admitted."""
        self._num_left -= num_jobs

    def count_traffic(self, num_jobs: int) -> None:
        """Count jobs of traffic that were admitted."""
        self._num_traffic_first = max(0, self._num_traffic_first - num_jobs)

    def _give(self, lane: LaneKey) -> None:
        self._lane, self._num_left = lane, self._batch
        self._served.append(lane)
