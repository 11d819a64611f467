"""The waiting jobs of one task in two lanes: the high one goes first, and the normal one always gets a share. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from worker.jobs.beginnings import HeldBeginnings, SharingSlack
from worker.jobs.lanes import LaneKey
from worker.jobs.waiting import Place, WaitingJob, WaitingJobs

Item = TypeVar("Item")

_ROUNDING: Final = 1e-9


@dataclass(slots=True)
class TaskJobs(Generic[Item]):
    """Jobs of the high lane start before all others of their task.

    While both lanes wait, each job of the high lane adds to what the normal lane is owed, so that one in `1 / share`
    starts is a normal job however fast high ones come. An empty lane is owed nothing. Probes and controls are of the
    normal lane.
    """

    normal_share: float  #: of the starts of a task in which both lanes wait
    high: WaitingJobs[Item] = field(default_factory=WaitingJobs)
    normal: WaitingJobs[Item] = field(default_factory=WaitingJobs)
    _owed: float = 0.0  # starts of the normal lane

    @property
    def num_jobs(self) -> int:
        """Jobs of both lanes."""
        return self.high.num_jobs + self.normal.num_jobs

    @property
    def has_traffic(self) -> bool:
        """Whether a job waits that may run beside other lanes of settings."""
        return self.high.has_traffic or self.normal.has_traffic

    @property
    def oldest_since_s(self) -> float:
        """When the job that waits longest began to wait.

        Raises:
            ValueError: no job waits.
        """
        return min(lane.oldest_since_s for lane in (self.high, self.normal) if lane.num_jobs)

    def add(self, place: Place, job: WaitingJob[Item]) -> None:
        """Let a job wait."""
        (self.high if job.is_high else self.normal).add(place, job)

    def measured_lanes(self) -> list[LaneKey]:
        """The measured lanes in which jobs wait, the one with the first job first."""
        return self.normal.measured_lanes()

    def is_measured_first(self) -> bool:
        """Whether the job that starts next is a probe or a control."""
        return (not self.high.num_jobs or self._is_normal_due) and self.normal.is_measured_first()

    def num_measured(self, lane: LaneKey) -> int:
        """How many jobs wait in a measured lane."""
        return self.normal.num_measured(lane)

    def num_shared(self, held: HeldBeginnings, slack: SharingSlack, job_s: float) -> int:
        """Tokens that the job that `take_traffic` would take shares with a running job; 0 where no traffic waits."""
        return self._next_lane().num_shared(held, slack, job_s)

    def take_traffic(self, held: HeldBeginnings, slack: SharingSlack, job_s: float) -> WaitingJob[Item]:
        """Take out the job of traffic that starts next. `job_s`: device seconds that jobs take.

        Raises:
            IndexError: no traffic waits.
        """
        lane = self._next_lane()
        if lane is self.normal:
            self._owed = max(0.0, self._owed - 1)
        elif self.normal.num_jobs:
            self._owed += self.normal_share / (1 - self.normal_share)
        else:
            self._owed = 0.0
        return lane.take_traffic(held, slack, job_s)

    def take_measured(self, lane: LaneKey) -> WaitingJob[Item]:
        """Take out the first job of a measured lane.

        Raises:
            KeyError: no job waits in this lane.
        """
        self._owed = max(0.0, self._owed - 1)
        return self.normal.take_measured(lane)

    def discard(self, unwanted: Callable[[Item], bool]) -> list[WaitingJob[Item]]:
        """Take out and return the jobs for which `unwanted` holds, those of the high lane first. O(n)."""
        return self.high.discard(unwanted) + self.normal.discard(unwanted)

    @property
    def _is_normal_due(self) -> bool:
        return self._owed >= 1 - _ROUNDING

    def _next_lane(self) -> WaitingJobs[Item]:
        is_normal = not self.high.num_jobs or (self._is_normal_due and self.normal.has_traffic)
        return self.normal if is_normal else self.high
