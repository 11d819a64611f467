"""Which task is served next, by device time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heapreplace

from worker.jobs.shares import DeviceShare


class TaskOrder:
    """The tasks of one call in the order of their virtual time with running jobs counted; ties go by name.

    The task served last stays until it is more than `quantum_s` ahead of the least-served, or more than the task's
    `slack_s_of`, if that is longer. Only the task being served may change its virtual time meanwhile.
    """

    def __init__(
        self,
        shares: Mapping[str, DeviceShare],
        served_last: str | None,
        quantum_s: float,
        slack_s_of: Callable[[str], float] = lambda task: 0.0,
    ) -> None:
        self._shares = shares
        self._quantum_s = quantum_s
        self._slack_s_of = slack_s_of
        self._serving = served_last if served_last in shares else None
        self._others = [(share.finish_s, name) for name, share in shares.items() if name != self._serving]
        heapify(self._others)

    def next(self) -> str | None:
        """The task to serve; None where none is left."""
        if self._serving is None:
            self._serving = heappop(self._others)[1] if self._others else None
        elif self._others:
            finish_s = self._shares[self._serving].finish_s
            ahead_s = finish_s - self._others[0][0]
            if ahead_s > self._quantum_s and ahead_s > self._slack_s_of(self._serving):
                self._serving = heapreplace(self._others, (finish_s, self._serving))[1]
        return self._serving

    def leave(self) -> None:
        """Leave out the task being served: it has nothing more to admit."""
        self._serving = None
