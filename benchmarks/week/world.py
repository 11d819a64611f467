"""The simulated week: tasks, what they send by day and night, and the device that decodes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np

from benchmarks.policy.scenario import FILE, Device, read_scenarios
from benchmarks.policy.slots import SlotTable
from worker.admission import LaneKey

DAY_S: Final = 86_400.0
NUM_SLOTS: Final = 8
DRAFTER: Final = "draft"
MOST_DRAFT_TOKENS: Final = 7
#: The device is `laptop` of the policy benchmark with a target and a draft model so many times as slow: a week of jobs
#: that take a minute is fewer of them than of jobs that take seconds.
SLOWER: Final = 8.0
LIMIT_TOKENS: Final = 4096


@dataclass(frozen=True)
class Stream:
    """Jobs of one kind. `share` is of the offered load."""

    task: str
    share: float
    tokens: float  #: of the median output
    spread: float  #: standard deviation of the logarithm of the output's length
    alpha: float  #: of the drafter
    deadline_s: tuple[float, float] | None  #: the shortest and the longest time to the deadline, spread evenly in logs
    is_high: bool = False
    segment: str = ""
    priority: int = 0
    nightly_at_s: float | None = None  #: all of a day's jobs come at this time of the day; None: by day and night
    batches_a_day: int = 0  #: jobs come in so many batches of unlike sizes
    is_regular: bool = True  #: these come within half an hour of times of the day, else at any time


STREAMS: Final = (
    Stream("chat", 0.15, 120, 0.6, 0.6, (180.0, 600.0), is_high=True, priority=100),
    Stream("code", 0.2, 400, 0.6, 0.8, (1800.0, 10_800.0)),
    Stream("code", 0.15, 400, 0.6, 0.8, (DAY_S, DAY_S), segment="batch", nightly_at_s=22 * 3600.0),
    Stream("rag", 0.2, 250, 0.8, 0.5, (1800.0, 21_600.0)),
    Stream("rag", 0.3, 250, 0.8, 0.5, None, priority=-100),
)
#: Weeks that the model of a week leaves out: a few texts that have most of the work, a device that becomes slower by
#: half in the middle, and producers that send every record to the same partition of its topic.
HEAVY_TAIL, COSTS_CHANGE, ONE_PARTITION = "heavy-tail", "costs-change", "one-partition"
HOSTILE: Final = (HEAVY_TAIL, COSTS_CHANGE, ONE_PARTITION)
_HEAVY_SPREAD: Final = 1.5
_SLOWNESS: Final = (0.8, 1.2)  #: of the first half and of the second; the mean load stays
#: Numbers of jobs this far apart are all in partition 0 of up to ten partitions, of twelve and of sixteen.
_APART: Final = 5040
#: Device time by weight: the batch of `code` has a fifth of its task's, while both wait.
SEGMENT_WEIGHTS: Final = {"": 4.0, "batch": 1.0}


@dataclass(slots=True, eq=False)
class WeekJob:
    """A job and what only a clairvoyant knows: its length and its acceptance."""

    number: int
    stream: Stream
    at_s: float
    deadline_s: float
    num_tokens: int
    alpha: float
    lane: LaneKey
    batch_id: str | None = None
    num_starts: int = 0
    ended_s: float = math.inf
    is_expired: bool = False


@dataclass(frozen=True)
class Week:
    """Jobs in the order of their arrival."""

    jobs: tuple[WeekJob, ...]
    table: SlotTable
    device: Device
    num_days: float
    load: float  #: offered, over what all workers can decode
    has_new_costs: bool = False  #: in the second half

    def slowness(self, now_s: float) -> float:
        """What a round takes then, over what the table says."""
        return _SLOWNESS[now_s >= self.num_days * DAY_S / 2] if self.has_new_costs else 1.0


def batch_streams(*, at_random: bool) -> tuple[Stream, ...]:
    """The same load with six batches a day in the place of jobs without a deadline."""
    batches = Stream("rag", 0.3, 250, 0.8, 0.5, (DAY_S, DAY_S), segment="batch", batches_a_day=6)
    return (*STREAMS[:-1], replace(batches, is_regular=not at_random))


def heavy_tailed(stream: Stream) -> Stream:
    """As many tokens, half of which a tenth of the texts has."""
    mean = stream.tokens * math.exp(stream.spread**2 / 2)
    tokens = mean / math.exp(_HEAVY_SPREAD**2 / 2)
    beyond = math.log(LIMIT_TOKENS / tokens) / _HEAVY_SPREAD
    normal = NormalDist()
    # More texts make up for what the limit cuts off.
    kept = normal.cdf(beyond - _HEAVY_SPREAD) + LIMIT_TOKENS / mean * normal.cdf(-beyond)
    return replace(stream, tokens=tokens, spread=_HEAVY_SPREAD, share=stream.share / kept)


def text_of(stream: Stream, rng: np.random.Generator) -> tuple[int, float]:
    """The length in tokens and the α of a job."""
    num_tokens = int(np.clip(rng.lognormal(math.log(stream.tokens), stream.spread), 2, LIMIT_TOKENS))
    logit = math.log(stream.alpha / (1 - stream.alpha)) + 0.4 * rng.standard_normal()
    return num_tokens, 1 / (1 + math.exp(-logit))


def yield_at(alpha: float, k: int) -> float:
    """Expected tokens of a round with k draft tokens, each accepted with probability α after those before it."""
    return (1 - alpha ** (k + 1)) / (1 - alpha)


def fastest_ms(table: SlotTable, alpha: float) -> float:
    """Milliseconds a token and sequence with all slots running, at the k that is fastest for this α."""
    return _fastest_ms(table, round(alpha, 3))


@cache
def _fastest_ms(table: SlotTable, alpha: float) -> float:
    full = NUM_SLOTS
    drafted = [table.draft_ms(DRAFTER, full, k) if k else 0.0 for k in range(MOST_DRAFT_TOKENS + 1)]
    return min((table.pass_ms(full, k) + drafted[k]) / yield_at(alpha, k) for k in range(MOST_DRAFT_TOKENS + 1))


def draw_week(
    *,
    load: float,
    num_days: float,
    num_workers: int,
    seed: int,
    streams: Sequence[Stream] = STREAMS,
    hostile: str | None = None,
) -> Week:
    """The week of this seed, at an offered load of `load` with all of the workers alive. `hostile`: see `HOSTILE`."""
    if hostile == HEAVY_TAIL:
        streams = [heavy_tailed(stream) for stream in streams]
    given = read_scenarios(FILE).devices["laptop"]
    device = _slower(given)
    table = SlotTable(device, NUM_SLOTS, {DRAFTER: MOST_DRAFT_TOKENS})
    rng = np.random.default_rng(seed)
    capacity_s = num_workers * num_days * DAY_S
    jobs: list[WeekJob] = []
    for stream in streams:
        mean_tokens = stream.tokens * math.exp(stream.spread**2 / 2)
        job_s = mean_tokens * fastest_ms(table, stream.alpha) / NUM_SLOTS / 1000
        num_jobs = rng.poisson(load * stream.share * capacity_s / job_s)
        for at_s, batch_id in _arrivals(stream, num_jobs, num_days, rng):
            num_tokens, alpha = text_of(stream, rng)
            within_s = math.inf
            if stream.deadline_s is not None:
                low, high = stream.deadline_s
                within_s = math.exp(rng.uniform(math.log(low), math.log(high)))
            lane = LaneKey(stream.task, "greedy", "auto", "traffic", "", 0)
            jobs.append(WeekJob(0, stream, at_s, at_s + within_s, num_tokens, alpha, lane, batch_id))
    jobs.sort(key=lambda job: job.at_s)
    for number, job in enumerate(jobs):
        job.number = number * (_APART if hostile == ONE_PARTITION else 1)
    offered_s = sum(job.num_tokens * fastest_ms(table, job.alpha) / NUM_SLOTS / 1000 for job in jobs)
    return Week(tuple(jobs), table, device, num_days, offered_s / capacity_s, has_new_costs=hostile == COSTS_CHANGE)


def _slower(device: Device) -> Device:
    surfaces = {"target": device.target, **device.drafters}
    slow = {
        name: surface.model_copy(
            update={"by_batch": {n: tuple(SLOWER * ms for ms in row) for n, row in surface.by_batch.items()}}
        )
        for name, surface in surfaces.items()
    }
    return device.model_copy(update={"target": slow.pop("target"), "drafters": slow})


def _arrivals(
    stream: Stream, num_jobs: int, num_days: float, rng: np.random.Generator
) -> Iterator[tuple[float, str | None]]:
    """Most jobs come around 14:00, three times as many as at 2:00; those of a batch at once. With the batch's id."""
    if stream.nightly_at_s is not None:
        for day in rng.integers(0, max(1, math.floor(num_days)), num_jobs):
            yield float(day) * DAY_S + stream.nightly_at_s, f"{stream.task}-night-{day}"
        return
    if stream.batches_a_day:
        num_batches = max(1, round(stream.batches_a_day * num_days))
        starts_s = rng.uniform(0, num_days * DAY_S, num_batches)
        if stream.is_regular:
            late_s = rng.uniform(-1800, 1800, num_batches)
            starts_s = (np.arange(num_batches) + 0.5) * DAY_S / stream.batches_a_day + late_s
        sizes = rng.lognormal(0, 0.5, len(starts_s))
        for number in rng.choice(len(starts_s), num_jobs, p=sizes / sizes.sum()):
            yield float(starts_s[number]), f"{stream.task}-{number}"
        return
    num_left = num_jobs
    while num_left:
        at_s = rng.uniform(0, num_days * DAY_S)
        rate = (1 + 0.5 * math.sin(2 * math.pi * (at_s / DAY_S - 8 / 24))) / 1.5
        if rng.random() < rate:
            num_left -= 1
            yield at_s, None
