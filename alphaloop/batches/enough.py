"""How many workers are enough: which deadlines are missed with so many, and the least number that meets them. Pure.

The fluid of `ends.py` is played with other numbers of workers. Deadlines are those of batches: a job that waits in
Kafka beside them is in no table, so its deadline is not known, and it counts as work without one. Such work is to be
through `drain_within_s` after it came: what waits now, and what comes within that time.

A request takes its time however many workers there are. Where its deadline is nearer, it is missed by any number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from alphaloop.batches.ends import DAY_S, NUM_DRAWS, BatchPart, Future, JobCosts, OpenBatch, Situation

_Draws: TypeAlias = npt.NDArray[np.float64]

#: Deadlines later than this are not judged: what arrives until then is not known well enough.
HORIZON_S: Final = DAY_S
#: Share of a segment's requests that may be late, and of other work that may not be through. It is half of the requests
#: in one of the 48 futures: these tell no smaller share from none.
MOST_LATE: Final = 0.01
MOST_WORKERS: Final = 1024  #: further ones are not tried
NOT_KNOWN: Final = "no job has ended in the last day, so what a job costs is not known"
#: Without work, and with nothing that came within this time, no worker is needed.
_IDLE_S: Final = 3600.0
#: A batch without a deadline that is not through in time is given this part of the time, again and again.
_LEAST_DRAIN: Final = 0.25
#: A request cannot end sooner than the fastest tenth of its line does on a full device.
_ALONE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Due:
    """Requests of one segment's batches whose deadlines come within a day, and how many are expected to miss them."""

    num_due: float
    num_late: float
    num_hopeless: float  #: of the late ones: with any number of workers
    until_s: float  #: the last of their deadlines, in seconds since 1970

    @property
    def late(self) -> float:
        """Share that is late."""
        return self.num_late / self.num_due

    @property
    def hopeless(self) -> float:
        """Share that is late with any number of workers."""
        return self.num_hopeless / self.num_due


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What is expected with so many workers."""

    num_workers: int
    due: Mapping[str, Due]  #: by segment, those that have requests with deadlines within a day
    undone: float  #: share of the work without a deadline that is not through in time, in the median future

    @property
    def meets_deadlines(self) -> bool:
        """Whether all are met that can be, but for `MOST_LATE`."""
        return all(due.late - due.hopeless <= MOST_LATE for due in self.due.values())

    @property
    def is_enough(self) -> bool:
        """Whether the other work is through in time, too."""
        return self.meets_deadlines and self.undone <= MOST_LATE


@dataclass(frozen=True)
class Enough:
    """The search for the least number of workers, which plays each number once."""

    situation: Situation
    drain_within_s: float
    _played: dict[int, Foreseen] = field(default_factory=dict)

    @cached_property
    def why_not_known(self) -> str | None:
        """Why nothing is foreseen; None where it is."""
        has_costs = any(job.device_s > 0 for job in self.situation.lately)
        return None if has_costs or self.is_idle else NOT_KNOWN

    @cached_property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing came lately."""
        situation = self.situation
        came = any(job.arrived_s >= situation.now_s - _IDLE_S for job in situation.lately)
        return not (came or self._open or any(situation.num_unfinished.values()))

    @cached_property
    def _open(self) -> list[OpenBatch]:
        return [batch for batch in self.situation.batches if sum(batch.num_open.values())]

    def least(self, hint: int = 1) -> int | None:
        """Workers that are enough for deadlines and other work; 0 where nothing is to be done.

        None where `MOST_WORKERS` are not, or nothing is known. `hint`: a number that may be near.
        """
        if self.is_idle:
            return 0
        return None if self.why_not_known else self._least(lambda foreseen: foreseen.is_enough, hint)

    def least_for_deadlines(self, hint: int = 1) -> int | None:
        """Workers that are enough for the deadlines that can be met; None as above, 0 where there are none."""
        if not self.with_workers(0).due:
            return 0
        return None if self.why_not_known else self._least(lambda foreseen: foreseen.meets_deadlines, hint)

    def with_workers(self, num_workers: int) -> Foreseen:
        """What is expected with this number. Raises ValueError where that is not known; of no worker it always is."""
        if num_workers and self.why_not_known:
            raise ValueError(self.why_not_known)
        if num_workers not in self._played:
            self._played[num_workers] = _foreseen(self.situation, self._open, num_workers, self.drain_within_s)
        return self._played[num_workers]

    def _least(self, holds: Callable[[Foreseen], bool], hint: int) -> int | None:
        """The least number for which it holds, from `hint` on in growing steps, then by halves."""
        number, step = min(max(1, hint), MOST_WORKERS), 1
        if holds(self.with_workers(number)):
            below = 0
            while number > 1:
                lower = max(1, number - step)
                if not holds(self.with_workers(lower)):
                    below = lower
                    break
                number, step = lower, 2 * step
        else:
            below = number
            while True:
                if below == MOST_WORKERS:
                    return None
                number = min(MOST_WORKERS, below + step)
                if holds(self.with_workers(number)):
                    break
                below, step = number, 2 * step
        while number - below > 1:
            middle = (below + number) // 2
            if holds(self.with_workers(middle)):
                number = middle
            else:
                below = middle
        return number


def _foreseen(situation: Situation, batches: list[OpenBatch], num_workers: int, drain_s: float) -> Foreseen:
    """Play the fluid once with this number of workers."""
    if not num_workers:
        return _with_none(situation, batches)
    future = Future(replace(situation, num_workers=num_workers), batches, JobCosts(situation.lately))
    now_s = situation.now_s
    moments = [_moment_s(part, now_s, drain_s) for part in future.parts]
    seen = future.at([drain_s, 2 * drain_s, *(moment_s for moment_s in moments if moment_s)])
    num_due, num_late, num_hopeless = (defaultdict[str, float](float) for _ in range(3))
    until_s: dict[str, float] = {}
    undone_s, wanted_s = np.zeros(NUM_DRAWS), np.zeros(NUM_DRAWS)
    for part, moment_s in zip(future.parts, moments, strict=True):
        segment = future.segment_of(part)
        if moment_s is None:
            continue
        left_s = part.work_s if moment_s <= 0 else np.clip(-seen[moment_s].over_s(part), 0, part.work_s)
        if math.isinf(part.batch.deadline_s):
            undone_s, wanted_s = undone_s + _by_draw(left_s), wanted_s + _by_draw(part.work_s)
            continue
        num_due[segment] += part.num_open
        share = float(_share(_by_draw(left_s), _by_draw(part.work_s)).mean())
        num_late[segment] += part.num_open * share
        num_hopeless[segment] += part.num_open * (moment_s <= 0)
        until_s[segment] = max(until_s.get(segment, 0.0), part.batch.deadline_s)
    due = {name: Due(num_due[name], num_late[name], num_hopeless[name], until_s[name]) for name in num_due}
    soon, later = seen[drain_s], seen[2 * drain_s]
    waiting_s = future.waiting_s
    undone_s += _by_draw(np.maximum(0.0, waiting_s - np.maximum(0.0, soon.served_s - soon.overtaken_s)).sum(axis=1))
    wanted_s += _by_draw(waiting_s.sum(axis=1))
    by_then_s = waiting_s + soon.came_s
    overdue_s = _by_draw(np.maximum(0.0, by_then_s - later.served_s).sum(axis=1))
    shares = np.maximum(_share(undone_s, wanted_s), _share(overdue_s, _by_draw(by_then_s.sum(axis=1))))
    return Foreseen(num_workers, due, float(np.median(shares)))


def _with_none(situation: Situation, batches: list[OpenBatch]) -> Foreseen:
    """Without a worker all is late."""
    num_due, until_s = defaultdict[str, float](float), dict[str, float]()
    for batch in batches:
        for (_, segment), num_open in batch.num_open.items():
            if num_open and 0 < batch.deadline_s - situation.now_s <= HORIZON_S:
                num_due[segment] += num_open
                until_s[segment] = max(until_s.get(segment, 0.0), batch.deadline_s)
    return Foreseen(0, {name: Due(num, num, 0.0, until_s[name]) for name, num in num_due.items()}, 1.0)


def _moment_s(part: BatchPart, now_s: float, drain_s: float) -> float | None:
    """Seconds from now at which its requests have to be through the fluid; 0: they cannot be. None: not judged."""
    if math.isinf(part.batch.deadline_s):
        return max(part.batch.created_s + drain_s - now_s, _LEAST_DRAIN * drain_s)
    left_s = part.batch.deadline_s - now_s
    if not 0 < left_s <= HORIZON_S:
        return None
    return max(0.0, left_s - float(np.quantile(part.cost.walls_s, _ALONE)))


def _by_draw(work_s: _Draws) -> _Draws:
    """Sums over the workers of each draw."""
    by_draw: _Draws = work_s.reshape(NUM_DRAWS, -1).sum(axis=1)
    return by_draw


def _share(part_s: _Draws, whole_s: _Draws) -> _Draws:
    """0 where there is no work."""
    share: _Draws = np.where(whole_s > 1e-9, part_s / np.maximum(whole_s, 1e-9), 0.0)
    return share
