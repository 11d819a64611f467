"""Jobs with which a worker died. Any of them may have killed it, so each is claimed alone.

A crash counts for every job that the dead worker had claimed, also for those that only waited for a slot. If suspects
were decoded one by one but claimed together, all of them would be given up with the one that kills each worker. A
suspect that is the only claim of its worker is the only job that the next crash counts for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker.intake.validation import ReadyJob
from worker.jobs.claiming import Claiming, Claims
from worker.jobs.leases import LeaseKeeper
from worker.retry import Retry


class Suspects:
    """Suspects that wait until this worker has no other claim. One thread owns it."""

    def __init__(self, claiming: Claiming, leases: LeaseKeeper, retry: Retry) -> None:
        self._claiming = claiming
        self._leases = leases
        self._retry = retry
        self._waiting: deque[ReadyJob] = deque()
        self._claimed = ""  # the job_id of the suspect claimed last

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting suspects."""
        return sum(ready.num_bytes for ready in self._waiting)

    @property
    def come_first(self) -> bool:
        """Whether a suspect waits or is being decoded: nothing else may be claimed."""
        return bool(self._waiting) or self._leases.holds(self._claimed)

    def set_aside(self, claims: Claims) -> list[ReadyJob]:
        """Take the suspects out of new claims and give these claims back uncounted; returns the suspects set aside.

        A suspect that is this worker's only claim stays.
        """
        found = [claimed for claimed in claims.to_decode if claimed.num_crashes]
        if not found:
            return []
        if self._leases.num_held == 1:
            self._claimed = found[0].job_id
            return []
        claims.to_decode = [claimed for claimed in claims.to_decode if not claimed.num_crashes]
        self._retry.until_done("give suspects back", lambda: self._claiming.give_back(found))
        self._leases.let_go(claimed.job_id for claimed in found)
        self._waiting.extend(claimed.ready for claimed in found)
        return [claimed.ready for claimed in found]

    def next(self) -> ReadyJob | None:
        """Take out the suspect to claim now; None while this worker has a claim."""
        return self._waiting.popleft() if self._waiting and not self._leases.num_held else None

    def discard(self, unwanted: Callable[[ReadyJob], bool]) -> None:
        """Drop those for which `unwanted` holds (their partition went to another worker)."""
        self._waiting = deque(ready for ready in self._waiting if not unwanted(ready))
