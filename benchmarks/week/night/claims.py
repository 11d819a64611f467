"""The claims about a night, judged alike for what a worker did and for what the simulator did. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from alphaloop.capacity.curve import Arrivals, LoadCurve, arrivals_of
from alphaloop.capacity.fleet import play
from benchmarks.week.night.ledger import STAGES, Ended, Said, by_stage
from benchmarks.week.night.schedule import STREAMS, name_of
from benchmarks.week.world import NUM_SLOTS

_QUARTER: Final = 0.25


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Device seconds with something to decode, in the second half of a night."""

    planned_s: float
    used_s: float

    @property
    def ratio(self) -> float:
        """Planned over used."""
        return self.planned_s / self.used_s


def deadlines(ended: Sequence[Ended]) -> dict[str, float]:
    """Shares of deadlines met, of all and by stream."""
    dated = [job for job in ended if job.deadline_s < math.inf]
    shares = {"all": fmean(job.is_met for job in dated)}
    for stream in STREAMS:
        if of := [job.is_met for job in dated if job.stream == stream]:
            shares[name_of(stream)] = fmean(of)
    return shares


def busy_time(ended: Sequence[Ended], half_s: float) -> BusyTime:
    """What `alphaloop capacity` plans for the second half from the first, and what was used.

    The plan knows what was decoded before `half_s`: the load curve, and each task's mean work. It plays the jobs that
    are open then and those that come later on one device.
    """
    decoded = [job.decoded for job in ended if job.decoded is not None and job.ended_s < half_s]
    curve = LoadCurve.of_jobs(decoded)
    alone_s = defaultdict[str, list[float]](list)
    for of in decoded:
        alone_s[of.task].append(arrivals_of(of, curve).alone_s)
    later = [job for job in ended if job.decoded is not None and job.ended_s >= half_s]
    arrivals = [
        Arrivals(max(0.0, job.at_s - half_s), fmean(alone_s[job.stream.task]), 1)
        for job in sorted(later, key=lambda job: job.at_s)
    ]
    planned = play(arrivals, curve, num_devices=1, num_slots=NUM_SLOTS)
    return BusyTime(planned.total_busy_s, _busy_s(later, half_s))


def _busy_s(ended: Sequence[Ended], from_s: float) -> float:
    """Seconds after `from_s` in which one of these was decoded."""
    begins = [(job.ended_s - job.decoded.wall_s, job.ended_s) for job in ended if job.decoded is not None]
    busy_s, until_s = 0.0, from_s
    for begin_s, end_s in sorted(begins):
        busy_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return busy_s


def ends(said: Sequence[Said]) -> dict[str, Any]:
    """Intervals that hold the end, by stage; the median half width over what remained once a quarter had ended."""
    stages = by_stage(said)
    widths = [promise.half_width for promise in stages[_QUARTER]]
    return {
        "num": len(said),
        "num_held": sum(promise.holds for promise in said),
        "num_by_stage": {str(stage): len(stages[stage]) for stage in STAGES},
        "num_held_by_stage": {str(stage): sum(promise.holds for promise in stages[stage]) for stage in STAGES},
        "half_width_at_a_quarter": median(widths) if widths else None,
    }


def undated_s(ended: Sequence[Ended]) -> tuple[float, float]:
    """The median and the longest time of jobs without a deadline or a batch, from arrival to text; nan without any."""
    undated = [job for job in ended if job.deadline_s == math.inf and job.batch_id is None]
    waits = [job.ended_s - job.at_s for job in undated if job.ended_s < math.inf]
    return (median(waits), max(waits)) if waits else (math.nan, math.nan)
