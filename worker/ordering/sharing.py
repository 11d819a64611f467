"""Sharing a device by weight: who of several goes next. Tasks share a worker so, and segments their task. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): who has the least expected virtual time, which is device time
over weight, is served. Who was idle begins at the least virtual time of those who wait: idleness earns no device time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final

NUM_REMEMBERED_JOBS: Final = 64  #: the mean device time of a job follows about this many ended jobs
SHORTEST_JOB_S: Final = 0.001  #: no job is expected to take less, so that many free jobs still count for something
#: So many idle ones are remembered at least. A segment is a free label, so there may be any number.
MOST_IDLE: Final = 256


class FairShares:
    """The shares of those who share a device, by name.

    Who is idle is forgotten when the others have caught up with its virtual time: then it comes back as one that is
    new. The `MOST_IDLE` that are furthest ahead stay remembered.
    """

    def __init__(self, weight_of: Callable[[str], float], unknown_job_s: Callable[[], float]) -> None:
        """`weight_of` is asked whenever one is charged, so weights may change.

        `unknown_job_s`: device seconds that a job of one is expected to need of whom none has ended.
        """
        self._weight_of = weight_of
        self._unknown_job_s = unknown_job_s
        self._shares: dict[str, DeviceShare] = {}
        self._finish_s: dict[str, float] = {}  # the virtual time that each is expected to have
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._most_charged_s = 0.0
        self._most_remembered = MOST_IDLE

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._shares)

    def wait(self, name: str) -> None:
        """One that had no waiting job has one."""
        share = self._of(name)
        share.virtual_s = max(share.virtual_s, self._level_s())
        self._finish_s[name] = share.finish_s
        self._waiting.add(name)
        if len(self._shares) > self._most_remembered:
            self._forget_idle()

    def wait_no_more(self, name: str) -> None:
        """One has no waiting job any more."""
        self._waiting.discard(name)

    def admit(self, name: str) -> None:
        """A job of this one begins to run."""
        share = self._of(name)
        share.admit(self._expected_s(share))
        self._finish_s[name] = share.finish_s
        self._running.add(name)

    def charge(self, name: str, device_s: float) -> None:
        """Count device seconds that the running jobs of this one had."""
        share = self._of(name)
        share.weight = self._weight_of(name)
        share.charge(device_s)
        self._finish_s[name] = share.finish_s
        self._most_charged_s = max(self._most_charged_s, share.virtual_s)

    def observe(self, num_running: Mapping[str, int]) -> Set[str]:
        """Take how many jobs of each still run; returns of whom jobs ran or run."""
        seen = self._running | num_running.keys()
        for name in seen:
            share = self._of(name)
            share.observe(num_running.get(name, 0))
            self._finish_s[name] = share.finish_s
        self._running = set(num_running)
        return seen

    def expected_job_s(self, name: str) -> float:
        """Device seconds that a job of this one is expected to need."""
        return self._expected_s(self._of(name))

    def _expected_s(self, share: DeviceShare) -> float:
        mean_s = share.mean_job_s
        return self._unknown_job_s() if mean_s is None else max(SHORTEST_JOB_S, mean_s)

    def known_job_s(self) -> list[float]:
        """The mean device seconds of a job, of each of whom jobs have ended."""
        return [share.mean_job_s for share in self._shares.values() if share.mean_job_s is not None]

    def least_served(self, among: Iterable[str]) -> str | None:
        """Who goes next of these, who wait; of equals, the first of them."""
        return min(among, key=self._finish_s.__getitem__, default=None)

    def ahead_s(self, name: str, other: str) -> float:
        """Device seconds over weight that one is expected to be ahead of another."""
        return self._finish_s[name] - self._finish_s[other]

    def _of(self, name: str) -> DeviceShare:
        if (share := self._shares.get(name)) is None:
            share = self._shares[name] = DeviceShare()
            share.weight = self._weight_of(name)
            self._finish_s[name] = share.finish_s
        return share

    def _level_s(self) -> float:
        """The virtual time at which one begins that comes now."""
        return min((self._shares[name].virtual_s for name in self._waiting), default=self._most_charged_s)

    def _forget_idle(self) -> None:
        level_s = self._level_s()
        idle = [name for name in self._shares if name not in self._waiting and name not in self._running]
        ahead = [name for name in idle if self._shares[name].virtual_s > level_s]
        ahead.sort(key=lambda name: self._shares[name].virtual_s)
        for name in set(idle).difference(ahead[-MOST_IDLE:]):
            del self._shares[name], self._finish_s[name]
        # Those that wait or run are bounded by the buffers. Twice as many, so that this is seldom done.
        self._most_remembered = max(MOST_IDLE, 2 * len(self._shares))


class DeviceShare:
    """One's device time over its weight (virtual time), and the device time that its jobs are expected to take.

    Device seconds are known only after a step, so an admitted job counts with its expected device seconds until real
    ones take their place. The device seconds of a step are split evenly over the running jobs. Which job ended
    is not known here, so the oldest one is taken. The mean over jobs does not depend on that choice (Little, 1961).
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.virtual_s = 0.0  #: charged device seconds over weight
        #: Exponentially weighted mean of device seconds a job; None before one ended.
        self.mean_job_s: float | None = None
        self._num_ended = 0
        self._expected_s = 0.0  # device seconds that running jobs are expected to need and were not charged
        self._per_job_s = 0.0  # device seconds that a job running since the beginning would have had
        self._began_at_s: deque[float] = deque()  # `_per_job_s` when each running job began

    @property
    def num_running(self) -> int:
        """Jobs admitted and, as far as is known, not ended."""
        return len(self._began_at_s)

    @property
    def finish_s(self) -> float:
        """The virtual time that is expected once the running jobs have ended."""
        return self.virtual_s + self._expected_s / self.weight

    def admit(self, expected_s: float) -> None:
        """Count a job that begins to run, with the device seconds that it is expected to need."""
        self._expected_s += expected_s
        self._began_at_s.append(self._per_job_s)

    def charge(self, device_s: float) -> None:
        """Count device seconds that the running jobs had."""
        self.virtual_s += device_s / self.weight
        self._expected_s -= min(device_s, self._expected_s)
        self._per_job_s += device_s / max(1, self.num_running)

    def observe(self, num_running: int) -> None:
        """Take the number of jobs that still run; ended jobs update the mean and count no expected seconds."""
        while self.num_running > num_running:
            self._learn(self._per_job_s - self._began_at_s.popleft())
        while self.num_running < num_running:
            self._began_at_s.append(self._per_job_s)
        if self.mean_job_s is not None:
            self._expected_s = min(self._expected_s, num_running * max(SHORTEST_JOB_S, self.mean_job_s))

    def _learn(self, device_s: float) -> None:
        self._num_ended += 1
        mean = self.mean_job_s or 0.0
        self.mean_job_s = mean + (device_s - mean) / min(self._num_ended, NUM_REMEMBERED_JOBS)
