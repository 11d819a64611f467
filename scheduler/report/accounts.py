"""What speculation saved, what probes took, and when nobody measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

from alphaloop.switchback.speedup import Verdict
from alphaloop.switchback.task_speedup import TaskSpeedup
from scheduler.report.data import GapLine
from scheduler.report.part import Estimate


def saved_device_s(measured: TaskSpeedup | None) -> Estimate | None:
    """Device seconds that speculation saved a task in the slices of its speed-up; below 0 they were lost.

    The speculative rounds took their share of the device's time, seconds times sequences over the sequences of a
    round; vanilla they would have taken the speed-up times as long. None without a verdict.
    """
    if measured is None or measured.speedup is None or measured.verdict is Verdict.NO_VERDICT_YET:
        return None
    if measured.mean_running <= 0:
        return None
    spent_s, found = measured.sequence_s / measured.mean_running, measured.speedup
    return Estimate(mean=spent_s * (found.mean - 1), low=spent_s * (found.low - 1), high=spent_s * (found.high - 1))


def gaps(runs: Sequence[datetime], now: datetime, longest_pause: timedelta) -> tuple[GapLine, ...]:
    """Times without a run that are longer than `longest_pause`, oldest first. `runs` are starts, oldest first."""
    return tuple(_longer(pairwise((*runs, now)), longest_pause))


def _longer(pairs: Iterable[tuple[datetime, datetime]], longest_pause: timedelta) -> Iterable[GapLine]:
    for before, after in pairs:
        if after - before > longest_pause:
            yield GapLine(begins=before, ends=after)
