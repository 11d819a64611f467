"""Jobs with which a worker died. Any of them may have killed it, so each is claimed alone.

A crash counts for every job that the dead worker had claimed, also for those that only waited for a slot. If suspects
were decoded one by one but claimed together, all of them would be given up with the one that kills each worker. A
suspect that is the only claim of its worker is the only job that the next crash counts for.

The next suspect is drawn at random. If the oldest always came first, workers that are killed from outside every few
seconds would die with the same few jobs again and again, and these would be given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from worker.intake.validation import ReadyJob
from worker.jobs.claiming import Claims
from worker.jobs.leases import LeaseKeeper


class Suspects:
    """Suspects that wait until this worker has no other claim. One thread owns it."""

    def __init__(self, leases: LeaseKeeper, rng: random.Random) -> None:
        self._leases = leases
        self._rng = rng
        self._waiting: list[ReadyJob] = []
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
        """Let the suspects that a group's claim left unclaimed wait, and return them.

        A suspect in `claims.to_decode` was asked for alone: it is this worker's only claim.
        """
        for claimed in claims.to_decode:
            if claimed.num_crashes:
                self._claimed = claimed.job_id
        self._waiting.extend(claims.suspects)
        return claims.suspects

    def next(self) -> ReadyJob | None:
        """Take out the suspect to claim now; None while this worker has a claim."""
        if not self._waiting or self._leases.num_held:
            return None
        return self._waiting.pop(self._rng.randrange(len(self._waiting)))

    def discard(self, unwanted: Callable[[ReadyJob], bool]) -> None:
        """Drop those for which `unwanted` holds (their partition went to another worker)."""
        self._waiting = [ready for ready in self._waiting if not unwanted(ready)]
