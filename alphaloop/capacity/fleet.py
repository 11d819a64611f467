"""A fleet of equal devices played over arrivals, first in, first out; and the least fleet that keeps a deadline. Pure.

All devices share one queue, and the sequences that run are spread evenly over them, so that all of them get on at the
same speed: the clock of the fleet says how many seconds' worth of work alone a sequence has got that ran from the
beginning. An arrival ends when the clock has advanced by its work since it started.

More devices never end a sequence later: as long as every sequence has got as much with them as without, no more of them
are left, so no more share a device, and whatever ran without them runs with them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from alphaloop.capacity.curve import Arrivals, LoadCurve

#: Busy time is summed by quarters of an hour, because prices hold for whole ones.
PERIOD_S: Final = 900.0
#: An end so many seconds after the deadline keeps it: times are sums of floating-point numbers.
_CLOSE_S: Final = 1e-3


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What became of the arrivals."""

    num_devices: int
    num_late: int  #: sequences that ended after the deadline, of those that alone would have kept it
    slowest_s: float  #: the longest time from an arrival to its end
    busy_s: tuple[float, ...]  #: device seconds with something to decode, by periods of `PERIOD_S` from 0 on

    @property
    def total_busy_s(self) -> float:
        """All of them."""
        return math.fsum(self.busy_s)


def play(
    arrivals: Sequence[Arrivals], curve: LoadCurve, *, num_devices: int, num_slots: int, deadline_s: float = math.inf
) -> FleetRun:
    """Decode arrivals, in the order of `at_s` ≥ 0, on devices that run at most `num_slots` sequences each."""
    speeds = _Speeds(curve, num_devices)
    running: list[tuple[float, float, int, bool]] = []  # the clock at the end, the arrival, how many, whether it counts
    waiting: deque[tuple[Arrivals, int]] = deque()
    busy: list[float] = []
    now_s = clock_s = slowest_s = 0.0
    num_free, num_late, position = num_devices * num_slots, 0, 0
    num_running = 0
    while position < len(arrivals) or running:
        next_s = arrivals[position].at_s if position < len(arrivals) else math.inf
        if running:
            speed = speeds.of(num_running)
            ends_s = now_s + max(0.0, running[0][0] - clock_s) / speed
            _add_busy(busy, now_s, min(next_s, ends_s), min(num_running, num_devices))
            if ends_s <= next_s:
                clock_s, next_s = running[0][0], ends_s
            else:
                clock_s += (next_s - now_s) * speed
        now_s = max(now_s, next_s)
        while running and running[0][0] <= clock_s:
            _, at_s, number, counts = heappop(running)
            num_running -= number
            num_free += number
            if counts:
                slowest_s = max(slowest_s, now_s - at_s)
                num_late += number if now_s - at_s > deadline_s + _CLOSE_S else 0
        while position < len(arrivals) and arrivals[position].at_s <= now_s:
            waiting.append((arrivals[position], arrivals[position].number))
            position += 1
        while waiting and num_free:
            coming, number = waiting.popleft()
            started = min(number, num_free)
            heappush(running, (clock_s + coming.alone_s, coming.at_s, started, coming.alone_s <= deadline_s))
            num_running += started
            num_free -= started
            if started < number:
                waiting.appendleft((coming, number - started))
    return FleetRun(num_devices, num_late, slowest_s, tuple(busy))


def least_fleet(arrivals: Sequence[Arrivals], curve: LoadCurve, *, num_slots: int, deadline_s: float) -> FleetRun:
    """The fewest devices with which every arrival that can keep the deadline does: one at least.

    A sequence that takes longer than the deadline alone keeps it on no number of devices; it is decoded all the same.
    """

    def with_devices(number: int) -> FleetRun:
        return play(arrivals, curve, num_devices=number, num_slots=num_slots, deadline_s=deadline_s)

    most = sum(coming.number for coming in arrivals)  # each alone on a device
    enough = with_devices(1)
    too_few = 0
    while enough.num_late and enough.num_devices < most:
        too_few = enough.num_devices
        enough = with_devices(min(most, 2 * too_few))
    while enough.num_devices - too_few > 1:
        middle = with_devices((too_few + enough.num_devices) // 2)
        if middle.num_late:
            too_few = middle.num_devices
        else:
            enough = middle
    return enough


@dataclass(frozen=True, slots=True)
class BusyWindow:
    """A stretch of time and the work that arrived in it."""

    begins_s: float
    length_s: float
    device_s: float  #: of full devices

    @property
    def num_devices(self) -> float:
        """Full devices that do this work in this time."""
        return self.device_s / self.length_s


def busiest(arrivals: Sequence[Arrivals], curve: LoadCurve, *, num_slots: int, length_s: float) -> BusyWindow:
    """The stretch of `length_s` in which the most work arrived, at full devices; it begins with an arrival."""
    full = curve.at(num_slots) / num_slots
    best, inside, last = BusyWindow(0.0, length_s, 0.0), 0.0, 0
    for coming in arrivals:
        while last < len(arrivals) and arrivals[last].at_s < coming.at_s + length_s:
            inside += arrivals[last].alone_s * arrivals[last].number * full
            last += 1
        if inside > best.device_s * (1 + 1e-9):
            best = BusyWindow(coming.at_s, length_s, inside)
        inside -= coming.alone_s * coming.number * full
    return best


def work_by_period(arrivals: Sequence[Arrivals], curve: LoadCurve, *, num_slots: int) -> tuple[float, ...]:
    """The work that arrived in each period of `PERIOD_S` from 0 on, in seconds of full devices."""
    full = curve.at(num_slots) / num_slots
    work = [0.0] * (1 + int(max((coming.at_s for coming in arrivals), default=0.0) / PERIOD_S))
    for coming in arrivals:
        work[int(coming.at_s / PERIOD_S)] += coming.alone_s * coming.number * full
    return tuple(work)


class _Speeds:
    """How fast a sequence gets on, by the sequences of the whole fleet."""

    def __init__(self, curve: LoadCurve, num_devices: int) -> None:
        self._curve, self._num_devices = curve, num_devices
        self._known: dict[int, float] = {}

    def of(self, num_running: int) -> float:
        """Seconds' worth of work alone, a second."""
        speed = self._known.get(num_running)
        if speed is None:
            speed = self._known[num_running] = 1 / self._curve.at(max(1.0, num_running / self._num_devices))
        return speed


def _add_busy(busy: list[float], begins_s: float, ends_s: float, num_busy: int) -> None:
    """Add the device seconds of a stretch to its periods."""
    while begins_s < ends_s:
        period = int(begins_s / PERIOD_S)
        busy.extend([0.0] * (period + 1 - len(busy)))
        until_s = min(ends_s, (period + 1) * PERIOD_S)
        busy[period] += (until_s - begins_s) * num_busy
        begins_s = until_s
