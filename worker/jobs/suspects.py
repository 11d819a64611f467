"""Jobs with which a worker died. Any of them may have killed it, so each is claimed alone.

A crash counts for every job that the dead worker had claimed, also for those that only waited for a slot. If suspects
were decoded one by one but claimed together, all of them would be given up with the one that kills each worker. A
suspect that is the only claim of its worker is the only job that the next crash counts for.

Workers may be killed from outside, as often as every few seconds (a rollout, a machine without memory). The jobs that
then happen to be alone are not to be given up for it. So the next suspect is drawn at random, because the oldest would
always be the one. And a suspect with which a worker died alone waits until its next worker has shown that it lives: for
`delay_s` after that worker's first claim, and twice as long after each further death.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from worker.intake.validation import ReadyJob
from worker.jobs.claiming import Claims
from worker.jobs.leases import LeaseKeeper


class Suspects:
    """Suspects that wait until this worker has no other claim. One thread owns it."""

    def __init__(self, leases: LeaseKeeper, rng: random.Random, *, delay_s: float, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._rng = rng
        self._delay_s = delay_s
        self._clock = clock
        self._since: float | None = None  # the first claim of this worker
        self._waiting: list[ReadyJob] = []
        self._claimed = ""  # the job_id of the suspect claimed last
        self.absent: frozenset[str] = frozenset()  #: claimed jobs that wait for a server that is away

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting suspects."""
        return sum(ready.num_bytes for ready in self._waiting)

    @property
    def come_first(self) -> bool:
        """Whether a suspect waits or is being decoded: nothing else may be claimed."""
        return bool(self._waiting) or (self._leases.holds(self._claimed) and self._claimed not in self.absent)

    def set_aside(self, claims: Claims) -> list[tuple[float, ReadyJob]]:
        """Let the suspects that a group's claim left unclaimed wait.

        Returns those that come too early, with the time of `clock` from which they may be asked for. A suspect in
        `claims.to_decode` was asked for alone: it is this worker's only claim.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        for claimed in claims.to_decode:
            if claimed.num_crashes:
                self._claimed = claimed.job_id
        early: list[tuple[float, ReadyJob]] = []
        for suspect, num_crashes in claims.suspects:
            num_alone = num_crashes - 1
            due = self._since + (self._delay_s * 2.0 ** (num_alone - 1) if num_alone else 0.0)
            if due > now:
                early.append((due, suspect))
            else:
                self._waiting.append(suspect)
        return early

    def next(self) -> ReadyJob | None:
        """Take out the suspect to claim now; None while this worker has a claim."""
        if not self._waiting or self._leases.num_held:
            return None
        return self._waiting.pop(self._rng.randrange(len(self._waiting)))

    def discard(self, unwanted: Callable[[ReadyJob], bool]) -> None:
        """Drop those for which `unwanted` holds (their partition went to another worker)."""
        self._waiting = [ready for ready in self._waiting if not unwanted(ready)]
