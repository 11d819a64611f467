"""Plays a week: arrivals, workers, one of which dies and comes back, and what became of every job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from benchmarks.week.contestants import Admission, Clairvoyant, Log, WorkerAdmission
from benchmarks.week.device import Decisions, Decoding, WeekDecisions, WeekDevice
from benchmarks.week.world import DAY_S, Week, WeekJob, text_of

#: A worker dies on the third day at 14:00 and is back after an hour; its jobs wait until their leases have run out.
DIES_S: Final = 2 * DAY_S + 14 * 3600
BACK_S: Final = DIES_S + 3600
LEASE_S: Final = 30.0
CLAIRVOYANT: Final = ("earliest deadline", "least slack")
CONTESTANTS: Final = ("slack", "priority", "arrival", *CLAIRVOYANT)


@dataclass(frozen=True)
class Played:
    """What became of a week's jobs under one order."""

    jobs: Sequence[WeekJob]
    decoded: Sequence[Decoding]  #: those that ended, of every worker
    busy_s: Mapping[int, float]  #: device seconds with something to decode, by day from 0
    num_workers: int

    @property
    def num_met(self) -> int:
        """Jobs with a deadline that ended by it."""
        return sum(job.ended_s <= job.deadline_s < math.inf for job in self.jobs)


@dataclass(frozen=True)
class Outage:
    """When the last worker dies, and is back."""

    dies_s: float
    back_s: float
    lease_s: float = LEASE_S


class Observer(Protocol):
    """Sees what a database and a broker see."""

    def came(self, job: WeekJob) -> None:
        """A producer sent it."""

    def ended(self, job: WeekJob, decoding: Decoding | None, now_s: float) -> None:
        """It ended or expired; it was not decoded without `decoding`."""

    def turned(self, now_s: float, num_alive: int) -> None:
        """Everything until then has happened."""


class Play:
    """One contestant over one week."""

    def __init__(
        self,
        week: Week,
        contestant: str,
        *,
        num_workers: int,
        seed: int,
        observer: Observer | None = None,
        outage: Outage | None = None,
        decisions: WeekDecisions | None = None,
    ) -> None:
        """`outage`: the week's where another worker goes on. `decisions`: production's."""
        self._observer = observer
        self._outage = outage or (Outage(DIES_S, BACK_S) if num_workers > 1 else None)
        self._jobs = [replace(job) for job in week.jobs]
        self._num_workers = num_workers
        decided = decisions or Decisions(week.table, seed)
        self._devices = [WeekDevice(week.table, decided, week.slowness) for _ in range(num_workers)]
        self._log = Log(num_workers)
        self._clairvoyant = (
            Clairvoyant(week, by_slack=contestant == "least slack") if contestant in CLAIRVOYANT else None
        )
        self._knows = contestant
        self._admissions: list[Admission] = []
        for number in range(num_workers):
            self._admissions.append(self._clairvoyant or self._worker_of(number, range(num_workers)))
        self._is_alive = [True] * num_workers

    def run(self) -> Played:
        """Until every job has ended or expired."""
        outage = self._outage
        changes = [(outage.dies_s, self._die), (outage.back_s, self._come_back)] if outage else []
        position, now_s = 0, 0.0
        waiting: list[tuple[float, list[WeekJob]]] = []  # of the dead worker, until their leases have run out
        while True:
            moments = [device.next_s for device in self._devices]
            moments += [self._jobs[position].at_s] if position < len(self._jobs) else []
            moments += [at_s for at_s, *_ in (*changes[:1], *waiting[:1])]
            if (next_s := min(moments)) == math.inf:
                break
            now_s = max(now_s, next_s)
            for device, admission in zip(self._devices, self._admissions, strict=True):
                admission.charge(device.advance(now_s))
            while position < len(self._jobs) and self._jobs[position].at_s <= now_s:
                self._come(self._jobs[position])
                position += 1
            while changes and changes[0][0] <= now_s:
                if (lost := changes.pop(0)[1](now_s)) and outage:
                    waiting.append((now_s + outage.lease_s, lost))
            while waiting and waiting[0][0] <= now_s:
                for job in waiting.pop(0)[1]:
                    self._append(job)
            self._turn(now_s)
        decoded = [each for device in self._devices for each in device.ended]
        days = sorted({day for device in self._devices for day in device.busy_s})
        busy_s = {day: sum(device.busy_s.get(day, 0.0) for device in self._devices) for day in days}
        return Played(self._jobs, decoded, busy_s, self._num_workers)

    def change_arrivals(self, now_s: float, later: Sequence[WeekJob]) -> None:
        """Let these jobs come after now instead of those that were to come."""
        self._jobs[:] = [*(job for job in self._jobs if job.at_s <= now_s), *later]

    def change_texts(self, rng: np.random.Generator) -> None:
        """Draw the lengths and acceptances anew of the jobs that have not started."""
        for job in self._jobs:
            if not job.num_starts and not job.is_expired:
                job.num_tokens, job.alpha = text_of(job.stream, rng)

    def _turn(self, now_s: float) -> None:
        for number, (device, admission) in enumerate(zip(self._devices, self._admissions, strict=True)):
            if not self._is_alive[number]:
                continue
            ended = device.take_ended()
            admission.ended(ended, now_s)
            start, expired = admission.turn(device.by_line, device.num_free, now_s)
            for job in expired:
                job.is_expired = True
            if start:
                device.start(start)
            if self._observer:
                for each in ended:
                    self._observer.ended(each.job, each, now_s)
                for job in expired:
                    self._observer.ended(job, None, now_s)
        if self._observer:
            self._observer.turned(now_s, sum(self._is_alive))

    def _come(self, job: WeekJob) -> None:
        self._append(job)
        if self._observer:
            self._observer.came(job)

    def _append(self, job: WeekJob) -> None:
        if self._clairvoyant is not None:
            self._clairvoyant.append(job)
        else:
            self._log.append(job)

    def _worker_of(self, number: int, alive: Sequence[int]) -> WorkerAdmission:
        return WorkerAdmission(self._log, self._partitions_of(number, alive), self._knows)

    def _die(self, now_s: float) -> list[WeekJob]:
        """The last worker dies. The others get its partitions, and its jobs again once their leases have run out."""
        last = self._num_workers - 1
        self._is_alive[last] = False
        lost = self._devices[last].lose_all()
        if self._clairvoyant is not None:
            self._clairvoyant.ended(lost, now_s)
            return [each.job for each in lost]
        dead = self._admissions[last]
        assert isinstance(dead, WorkerAdmission)
        jobs = [*(each.job for each in lost), *dead.claimed()]
        for job in jobs:
            self._log.finish(job)  # its record; it is sent again when its lease has run out
        self._assign([number for number in range(self._num_workers) if self._is_alive[number]])
        return jobs

    def _come_back(self, now_s: float) -> list[WeekJob]:
        self._is_alive[-1] = True
        if self._clairvoyant is None:
            self._admissions[-1] = self._worker_of(self._num_workers - 1, range(self._num_workers))
            self._assign(range(self._num_workers))
        return []

    def _assign(self, alive: Sequence[int]) -> None:
        for number in alive:
            admission = self._admissions[number]
            assert isinstance(admission, WorkerAdmission)
            admission.take_over(self._partitions_of(number, alive))

    def _partitions_of(self, number: int, alive: Sequence[int]) -> list[int]:
        """What the group assigns to a worker."""
        return [p for p in range(self._log.num_partitions) if alive[p % len(alive)] == number]
