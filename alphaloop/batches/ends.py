"""When batches end, as an interval: from what waits, shares, measured costs, arrivals and workers. Pure.

The worker's order is played forward as a fluid: each task that has work gets device time by weight, each segment of it
likewise (`worker/ordering/sharing.py`), and within a segment a batch comes after what waited before it. `NUM_DRAWS`
futures are played, each with its own costs, lengths and arrivals, as uncertain as they were measured. The promise is
their median, and an interval of `COVERAGE`.

What became of earlier promises corrects both: `PromiseCorrection` shifts the median, and scales the interval, by the
quarter of the requests that have ended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from alphaloop.acceptance import t_quantile

Line: TypeAlias = tuple[str, str]  #: task and segment
_Draws: TypeAlias = npt.NDArray[np.float64]

NUM_DRAWS: Final = 48
MOST_PARTS: Final = 8  #: of the fleet that are played apart: each worker has partitions of its own
COVERAGE: Final = 0.95
DAY_S: Final = 86_400.0
MOST_S: Final = 14 * DAY_S  #: what takes longer is not promised
#: A line's cost is the mean of its newest jobs: so many at most, so many at least, else that of its task, or of all.
MOST_JOBS: Final = 200
LEAST_JOBS: Final = 8
#: Jobs of the line that count beside a batch's own.
_PRIOR_JOBS: Final = 10.0
#: The part of the greatest number of jobs that share a device: with fewer a job takes more of the device's time.
_IS_FULL: Final = 0.75
#: Standard deviations of logarithms that no measurement shows: of the device's speed, and of a line's arrivals.
_SPEED_SD: Final = 0.03
_ARRIVALS_SD: Final = 0.15
_NEW_ARRIVALS_SD: Final = 0.4  #: before a whole day was seen
#: No end is expected with a smaller standard deviation: a share of what remains, and seconds.
_LEAST_SD: Final = 0.03
_LEAST_SD_S: Final = 5.0
_NUM_LAST_HOURS: Final = 3  #: that say at which level jobs arrive now
_PRIOR_ARRIVALS: Final = 30.0  #: jobs that the level of other days is worth
_FIRST_STEP_S: Final = 5.0
_STEP_SHARE: Final = 0.03  #: of the time that was played
_LEAST_SEEN_S: Final = 60.0  #: before jobs of a line are counted by the second


@dataclass(frozen=True, slots=True)
class LatelyDecoded:
    """A job of traffic that was decoded lately; times are seconds since 1970."""

    task: str
    segment: str
    batch_id: str | None
    arrived_s: float
    decoded_s: float
    wall_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that has not ended."""

    id: str
    created_s: float
    num_open: Mapping[Line, float]  #: requests that have not ended
    deadline_s: float = math.inf  #: when its requests expire


@dataclass(frozen=True, slots=True)
class ArrivalCourse:
    """Jobs that arrive in a line, by hour of the day (UTC)."""

    num_by_hour: Sequence[float]
    #: Variance of an hour's number over its mean: 1 where jobs come one by one, their number where they come together.
    dispersion: float = 1.0
    is_new: bool = False  #: less than a day of them was seen


@dataclass(frozen=True, slots=True)
class Situation:
    """What the workers of one target have before them."""

    now_s: float
    num_workers: int
    batches: Sequence[OpenBatch]
    num_unfinished: Mapping[str, int]  #: messages of every task, those of the batches among them
    lately: Sequence[LatelyDecoded]  #: the newest, in any order
    arrivals: Mapping[Line, ArrivalCourse]  #: of lines with traffic in the last days
    task_weight: Callable[[str], float] = lambda task: 1.0
    segment_weight: Callable[[str], float] = lambda segment: 1.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a batch ends, in seconds from now, before earlier promises are looked at. `why`: why that is not known."""

    median_s: float = math.nan
    sd_s: float = math.nan
    most_s: float = math.inf  #: its requests expire then
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise and what came."""

    batch_id: str
    median_s: float
    sd_s: float
    came_s: float  #: from the promise to the end
    quarter: int = 0  #: of the requests that had ended

    @property
    def miss(self) -> float:
        """By how many standard deviations it came later than promised; a worker's death counts as `_MOST_MISS`."""
        return max(-_MOST_MISS, min(_MOST_MISS, (self.came_s - self.median_s) / self.sd_s))


NUM_QUARTERS: Final = 4
_MOST_MISS: Final = 6.0
_PRIOR_BATCHES: Final = 4.0  #: that what is known before any history of promises is worth
_PRIOR_SCALE: Final = 2.0  #: the model leaves out what it does not know of


@dataclass(frozen=True, slots=True)
class PromiseCorrection:
    """What earlier promises say of the next."""

    shift: float = 0.0  #: standard deviations that ends come later than the median
    scale: float = _PRIOR_SCALE  #: of the standard deviation
    num_batches: int = 0

    @classmethod
    def of(cls, kept: Iterable[Kept], before: PromiseCorrection | None = None) -> PromiseCorrection:
        """From ended batches, each of which counts once however many promises it had. `before`: known without them."""
        before = before or cls()
        by_batch: defaultdict[str, list[float]] = defaultdict(list)
        for each in kept:
            by_batch[each.batch_id].append(each.miss)
        num = len(by_batch)
        total = sum(sum(misses) / len(misses) for misses in by_batch.values())
        shift = (_PRIOR_BATCHES * before.shift + total) / (_PRIOR_BATCHES + num)
        squares = sum(sum((z - shift) ** 2 for z in misses) / len(misses) for misses in by_batch.values())
        return cls(shift, math.sqrt((_PRIOR_BATCHES * before.scale**2 + squares) / (_PRIOR_BATCHES + num)), num)

    @classmethod
    def by_quarter(cls, kept: Sequence[Kept]) -> Sequence[PromiseCorrection]:
        """For the next promise in each quarter: from those of that quarter, which begin with what all of them say."""
        of_all = cls.of(kept)
        return [cls.of([each for each in kept if each.quarter == n], of_all) for n in range(NUM_QUARTERS)]

    def interval_s(self, outlook: Outlook) -> tuple[float, float, float]:
        """Seconds from now: the expected end, the earliest and the latest."""
        quantile = t_quantile(_PRIOR_BATCHES + self.num_batches, 1 - COVERAGE)
        middle_s = outlook.median_s + self.shift * outlook.sd_s
        half_s = quantile * self.scale * outlook.sd_s
        ends = (max(0.0, min(end_s, outlook.most_s)) for end_s in (middle_s, middle_s - half_s, middle_s + half_s))
        return next(ends), next(ends), next(ends)


def quarter_of(num_open: float, num_total: float) -> int:
    """The quarter of its requests in which a batch is, from 0."""
    ended = 1 - num_open / max(1.0, num_total)
    return max(0, min(NUM_QUARTERS - 1, int(NUM_QUARTERS * ended)))


@dataclass(frozen=True, slots=True)
class _Cost:
    """Device seconds and wall seconds of a job while the slots are full."""

    mean_s: float
    sd_s: float
    num_jobs: int
    walls_s: Sequence[float]


class JobCosts:
    """Costs of lines and batches, from the jobs that were decoded lately."""

    def __init__(self, lately: Sequence[LatelyDecoded]) -> None:
        shared = [job.wall_s / job.device_s for job in lately if job.device_s > 0]
        self.num_together = float(np.quantile(shared, 0.9)) if shared else 1.0
        newest = sorted((job for job in lately if job.device_s > 0), key=lambda job: -job.decoded_s)
        full = [job for job in newest if job.wall_s / job.device_s >= _IS_FULL * self.num_together]
        self._jobs = full if len(full) >= LEAST_JOBS else newest
        self._by: defaultdict[tuple[str, ...], list[LatelyDecoded]] = defaultdict(list)
        for job in self._jobs:
            for name in ((), (job.task,), (job.task, job.segment)):
                if len(of := self._by[name]) < MOST_JOBS:
                    of.append(job)
        self._of_batch: defaultdict[str, list[LatelyDecoded]] = defaultdict(list)
        for job in self._jobs:
            if job.batch_id is not None and len(of := self._of_batch[job.batch_id]) < MOST_JOBS:
                of.append(job)

    def of(self, line: Line) -> _Cost | None:
        """That of a line, else of its task, else of all."""
        for name in (line, line[:1], ()):
            if len(jobs := self._by.get(name, ())) >= (LEAST_JOBS if name else 1):
                return _cost(jobs)
        return None

    def of_batch(self, batch_id: str, line: Line) -> _Cost | None:
        """The line's, moved towards the batch's own jobs of it."""
        line_cost = self.of(line)
        own = [job for job in self._of_batch.get(batch_id, ()) if (job.task, job.segment) == line]
        if line_cost is None or len(own) < 2:
            return line_cost
        cost = _cost(own)
        share = cost.num_jobs / (cost.num_jobs + _PRIOR_JOBS)
        mix = [
            share * mine + (1 - share) * theirs
            for mine, theirs in ((cost.mean_s, line_cost.mean_s), (cost.sd_s, line_cost.sd_s))
        ]
        return _Cost(mix[0], mix[1], cost.num_jobs + int(_PRIOR_JOBS), cost.walls_s)


def _cost(jobs: Sequence[LatelyDecoded]) -> _Cost:
    device_s = np.array([job.device_s for job in jobs])
    sd_s = float(device_s.std(ddof=1)) if len(jobs) > 1 else float(device_s.mean())
    return _Cost(float(device_s.mean()), sd_s, len(jobs), [job.wall_s for job in jobs])


def outlooks(situation: Situation) -> dict[str, Outlook]:
    """When each batch ends, by id."""
    if not situation.num_workers:
        return {batch.id: Outlook(why="no worker runs") for batch in situation.batches}
    costs = JobCosts(situation.lately)
    known, found = [], dict[str, Outlook]()
    for batch in situation.batches:
        if not sum(batch.num_open.values()):
            found[batch.id] = Outlook(0.0, _LEAST_SD_S)
        elif any(costs.of(line) is None for line in batch.num_open):
            found[batch.id] = Outlook(why="no job has ended in the last day")
        else:
            known.append(batch)
    if known:
        found |= Future(situation, known, costs).play()
    return found


@dataclass(slots=True)
class BatchPart:
    """The requests of a batch in one line, over the draws."""

    batch: OpenBatch
    cost: _Cost
    line: int
    num_open: float
    work_s: _Draws
    after_s: _Draws  #: device seconds of its line until it ends
    end_s: _Draws  #: inf before


@dataclass(frozen=True, slots=True)
class FluidStep:
    """What the lines got in a time: device seconds by [draw and worker, line], sums since now where not of the step."""

    at_s: float  #: its beginning
    step_s: float
    got_s: _Draws  #: in the step
    served_s: _Draws
    overtaken_s: _Draws  #: of jobs that came later and went before batches
    came_s: _Draws  #: these among them
    come_s: _Draws  #: in the step
    before_s: _Draws  #: of `overtaken_s`, in the step

    def over_s(self, part: BatchPart) -> _Draws:
        """Device seconds since the part of a batch ended; below 0 what it still has to get with all before it."""
        over_s: _Draws = self.served_s[:, part.line] - part.after_s - self.overtaken_s[:, part.line]
        return over_s

    def until(self, moment_s: float) -> FluidStep:
        """Its beginning, until this moment in it."""
        share = (moment_s - self.at_s) / self.step_s
        rest = 1 - share
        return FluidStep(
            self.at_s,
            moment_s - self.at_s,
            share * self.got_s,
            self.served_s - rest * self.got_s,
            self.overtaken_s - rest * self.before_s,
            self.came_s - rest * self.come_s,
            share * self.come_s,
            share * self.before_s,
        )


class Future:
    """Plays the fluid. Rows of arrays are draws, in each of which every worker has a row: shares are a worker's own."""

    def __init__(self, situation: Situation, batches: Sequence[OpenBatch], costs: JobCosts) -> None:
        self._situation, self._costs = situation, costs
        self._rng = np.random.default_rng(0)
        self._num_parts = min(situation.num_workers, MOST_PARTS)
        of_batches = {line for batch in batches for line in batch.num_open}
        recent = {(job.task, job.segment) for job in situation.lately}
        self._lines = sorted(of_batches | situation.arrivals.keys() | recent)
        self._place = {line: number for number, line in enumerate(self._lines)}
        self._cost = [costs.of(line) or _Cost(1.0, 1.0, 1, [1.0]) for line in self._lines]
        spread = np.array([cost.sd_s / cost.mean_s / math.sqrt(cost.num_jobs) for cost in self._cost])
        self._job_s = np.array([cost.mean_s for cost in self._cost]) * np.exp(spread * self._normal(len(self._lines)))
        self._speed = situation.num_workers / self._num_parts * np.exp(_SPEED_SD * self._normal(1)[:, 0])
        self._relative = np.array([(cost.sd_s / cost.mean_s) ** 2 for cost in self._cost])
        self.parts = self._parts_of(batches)
        self.waiting_s = self._waiting(batches)
        self._overtaking = self._overtaking_of(batches)
        self._by_hour = self._hours()
        self._dispersion = np.array([self._arrivals(line).dispersion for line in self._lines])
        sd = [_NEW_ARRIVALS_SD if self._arrivals(line).is_new else _ARRIVALS_SD for line in self._lines]
        self._busier = np.exp(np.array(sd) * self._normal(len(self._lines)))
        self._weights = self._shares()

    def _normal(self, num: int) -> _Draws:
        """Standard normal deviates, the same for all workers of a draw."""
        return np.repeat(self._rng.normal(0, 1, (NUM_DRAWS, num)), self._num_parts, axis=0)

    def _split(self, num: float) -> _Draws:
        """Divide a number of jobs among the workers, as partitions do: at random."""
        parts = self._rng.multinomial(math.ceil(num), [1 / self._num_parts] * self._num_parts, NUM_DRAWS)
        return np.asarray(parts, dtype=float).reshape(-1)

    def play(self) -> dict[str, Outlook]:
        """Until every batch has ended in every draw, or `MOST_S`."""
        for step in self._steps(MOST_S):
            for part in self.parts:
                over_s = step.over_s(part)
                ends = (over_s >= -1e-9) & np.isinf(part.end_s)
                got = np.maximum(step.got_s[:, part.line], 1e-12)
                part.end_s[ends] = step.at_s + step.step_s * (1 - np.clip(over_s / got, 0, 1))[ends]
            if not any(np.isinf(part.end_s).any() for part in self.parts):
                break
        return self._read()

    def at(self, moments_s: Iterable[float]) -> dict[float, FluidStep]:
        """How far every line is at each of these seconds from now, which are above 0."""
        left, seen = sorted(set(moments_s), reverse=True), dict[float, FluidStep]()
        for step in self._steps(left[0]) if left else ():
            while left and left[-1] <= step.at_s + step.step_s:
                moment_s = left.pop()
                seen[moment_s] = step.until(moment_s)
        return seen

    def segment_of(self, part: BatchPart) -> str:
        """The segment of its requests."""
        return self._lines[part.line][1]

    def _steps(self, until_s: float) -> Iterator[FluidStep]:
        left_s = self.waiting_s.copy()  # device seconds that each line has before its first batch
        for part in self.parts:
            left_s[:, part.line] += part.work_s
            part.after_s = left_s[:, part.line].copy()
        served_s, overtaken_s, came_s = (np.zeros_like(left_s) for _ in range(3))
        at_s = 0.0
        while at_s < until_s:
            step_s = max(_FIRST_STEP_S, _STEP_SHARE * at_s)
            come_s = self._come(at_s, step_s)
            before_s = self._job_s * self._overtaking * step_s / self._num_parts
            left_s = left_s + come_s + before_s
            got_s = self._divide(left_s, self._speed * step_s)
            left_s, served_s, overtaken_s = left_s - got_s, served_s + got_s, overtaken_s + before_s
            came_s = came_s + come_s + before_s
            yield FluidStep(at_s, step_s, got_s, served_s, overtaken_s, came_s, come_s + before_s, before_s)
            at_s += step_s

    def _read(self) -> dict[str, Outlook]:
        ends: dict[str, _Draws] = {}
        for part in self.parts:
            end_s = (part.end_s + self._tail(part)).reshape(NUM_DRAWS, self._num_parts).max(axis=1)
            ends[part.batch.id] = np.maximum(ends.get(part.batch.id, 0.0), end_s)
        found = {}
        for batch in {part.batch.id: part.batch for part in self.parts}.values():
            # What no draw has ended is later than any that is promised.
            end_s = np.minimum(ends[batch.id], 2 * MOST_S)
            low_s, median_s, high_s = np.quantile(end_s, [0.16, 0.5, 0.84])
            most_s = max(0.0, batch.deadline_s - self._situation.now_s)
            if min(high_s, most_s) > MOST_S:
                found[batch.id] = Outlook(why=f"it takes more than {MOST_S / DAY_S:.0f} days as things are now")
            else:
                sd_s = max(float(high_s - low_s) / 2, _LEAST_SD * float(median_s), _LEAST_SD_S)
                found[batch.id] = Outlook(float(median_s), sd_s, most_s)
        return found

    def _parts_of(self, batches: Sequence[OpenBatch]) -> list[BatchPart]:
        parts = []
        for batch in sorted(batches, key=lambda batch: (batch.deadline_s, batch.created_s)):
            for line, num_open in batch.num_open.items():
                cost = self._costs.of_batch(batch.id, line)
                if cost is None or not num_open:
                    continue
                relative = cost.sd_s / cost.mean_s
                num = self._split(num_open)
                # The mean is uncertain in all workers alike, the lengths of the jobs in each of them.
                mean_s = cost.mean_s * np.exp(relative / math.sqrt(cost.num_jobs) * self._normal(1)[:, 0])
                unit = np.maximum(relative**2, 1e-6)
                work_s = mean_s * self._rng.gamma(np.maximum(num / unit, 1e-12), unit)
                work_s, ends_s = np.where(num > 0, work_s, 0.0), np.where(num > 0, np.inf, 0.0)
                part = BatchPart(batch, cost, self._place[line], num_open, work_s=work_s, after_s=work_s, end_s=ends_s)
                parts.append(part)
        return parts

    def _waiting(self, batches: Sequence[OpenBatch]) -> _Draws:
        """Device seconds of the jobs that wait and belong to no batch, spread over lines as jobs came lately."""
        of_batches: defaultdict[str, float] = defaultdict(float)
        for batch in batches:
            for (task, _), num in batch.num_open.items():
                of_batches[task] += num
        came: defaultdict[Line, float] = defaultdict(float)
        for job in self._situation.lately:
            if job.batch_id is None:
                came[job.task, job.segment] += 1
        num_waiting = np.zeros(len(self._lines))
        for task, num_messages in self._situation.num_unfinished.items():
            lines = [line for line in self._lines if line[0] == task]
            total = sum(came[line] for line in lines)
            for line in lines:
                share = came[line] / total if total else 1 / len(lines)
                num_waiting[self._place[line]] = max(0.0, num_messages - of_batches[task]) * share
        waiting: _Draws = np.stack([self._split(num) for num in num_waiting], axis=1) * self._job_s
        return waiting

    def _arrivals(self, line: Line) -> ArrivalCourse:
        """Those of the last days, else as many as lately."""
        if (known := self._situation.arrivals.get(line)) is not None:
            return known
        return ArrivalCourse([3600 * self._lately(line)] * 24, is_new=True)

    def _hours(self) -> _Draws:
        """Jobs a second, by the hour of the day and line."""
        return np.array([self._arrivals(line).num_by_hour for line in self._lines]).T / 3600

    def _rate(self, second: float) -> _Draws:
        """Jobs a second of each line at a second of the day, between the middles of hours."""
        hours = second / 3600 - 0.5
        before = math.floor(hours)
        share = hours - before
        rate: _Draws = (1 - share) * self._by_hour[before % 24] + share * self._by_hour[(before + 1) % 24]
        return rate

    def _lately(self, line: Line, since_s: float = -math.inf) -> float:
        """Jobs a second of a line that belong to no batch, came after `since_s`, and were decoded lately."""
        of_task = [job for job in self._situation.lately if job.task == line[0]]
        begin_s = max(since_s, min((job.decoded_s for job in of_task), default=math.inf))
        num = sum(job.batch_id is None and job.segment == line[1] and job.arrived_s >= since_s for job in of_task)
        seen_s = self._situation.now_s - begin_s
        return num / seen_s if seen_s >= _LEAST_SEEN_S else 0.0

    def _overtaking_of(self, batches: Sequence[OpenBatch]) -> _Draws:
        """Jobs a second of each line with a batch that came after it, belong to none, and were decoded before it."""
        rates = np.zeros(len(self._lines))
        for number, line in enumerate(self._lines):
            created_s = [batch.created_s for batch in batches if line in batch.num_open]
            if created_s:
                rates[number] = self._lately(line, min(created_s))
        return rates

    def _come(self, at_s: float, step_s: float) -> _Draws:
        """Device seconds that arrive in a step: a compound Poisson process, as a gamma of its mean and variance."""
        rate = self._rate(self._situation.now_s % DAY_S + at_s + step_s / 2) * self._busier
        mean_s = np.maximum(0.0, rate - self._overtaking) * step_s / self._num_parts * self._job_s
        unit_s = self._job_s * (self._dispersion + self._relative)
        come: _Draws = self._rng.gamma(np.maximum(mean_s / unit_s, 1e-12), unit_s)
        return np.where(mean_s > 0, come, 0.0)

    def _shares(self) -> list[tuple[float, npt.NDArray[np.intp], _Draws]]:
        """By task: its weight, its lines, and their weights."""
        by_task: defaultdict[str, list[int]] = defaultdict(list)
        for number, (task, _) in enumerate(self._lines):
            by_task[task].append(number)
        situation = self._situation
        return [
            (
                situation.task_weight(task),
                np.array(numbers),
                np.array([situation.segment_weight(self._lines[number][1]) for number in numbers]),
            )
            for task, numbers in sorted(by_task.items())
        ]

    def _divide(self, left_s: _Draws, device_s: _Draws) -> _Draws:
        """The device seconds that each line gets of these, by weight, none more than it has work for."""
        wanted = np.stack([left_s[:, lines].sum(axis=1) for _, lines, _ in self._weights], axis=1)
        of_tasks = divided(wanted, np.array([weight for weight, *_ in self._weights]), device_s)
        got = np.zeros_like(left_s)
        for number, (_, lines, weights) in enumerate(self._weights):
            got[:, lines] = divided(left_s[:, lines], weights, of_tasks[:, number])
        return got

    def _tail(self, part: BatchPart) -> _Draws:
        """How much longer than the mean the longest of the last jobs takes, which run at once in a worker."""
        walls_s = np.asarray(part.cost.walls_s)
        num_last = int(max(1, min(part.num_open / self._num_parts, self._costs.num_together / len(self._weights))))
        longest: _Draws = self._rng.choice(walls_s, (len(part.end_s), num_last)).max(axis=1)
        return np.where(part.end_s > 0, np.maximum(0.0, longest - walls_s.mean()), 0.0)


def divided(wanted: _Draws, weights: _Draws, available: _Draws) -> _Draws:
    """Weighted max-min fair shares: [draws, who] of what is wanted, from [draws] of what there is."""
    got, left = np.zeros_like(wanted), np.asarray(available, dtype=float).copy()
    for _ in range(wanted.shape[1]):
        hungry = wanted - got > 1e-12
        share = np.where(hungry, weights, 0.0)
        total = share.sum(axis=1)
        if not (total * left > 1e-12).any():
            break
        given = np.minimum(wanted - got, share * (left / np.maximum(total, 1e-300))[:, None])
        got, left = got + given, left - given.sum(axis=1)
    return got


def arrivals_of(
    num_jobs: Mapping[Line, Mapping[int, float]], first_hour: int, this_hour: int
) -> dict[Line, ArrivalCourse]:
    """From jobs by hour since 1970, of which `this_hour` is not over; lines without a whole hour are left out.

    A line has the course of the days since `first_hour`, at the level of its last hours; hours of the day that were
    never seen are as the last ones. The dispersion is that of the differences of consecutive hours, in which the course
    of the day is small.
    """
    hours = np.arange(first_hour, this_hour)
    found: dict[Line, ArrivalCourse] = {}
    for line, by_hour in num_jobs.items():
        counts = np.array([by_hour.get(hour, 0.0) for hour in range(first_hour, this_hour)])
        if not counts.any():
            continue
        squares = np.square(np.diff(counts)).mean() / 2 if len(counts) > 1 else 0.0
        dispersion = max(1.0, float(squares / counts.mean()))
        sums, num_seen = np.zeros(24), np.zeros(24)
        np.add.at(sums, hours % 24, counts)
        np.add.at(num_seen, hours % 24, 1)
        last = counts[-_NUM_LAST_HOURS:]
        course = np.where(num_seen > 0, sums / np.maximum(1, num_seen), last.mean())
        expected, prior = course[hours[-_NUM_LAST_HOURS:] % 24].sum(), _PRIOR_ARRIVALS * dispersion
        level = (last.sum() + prior) / (expected + prior)
        found[line] = ArrivalCourse((course * level).tolist(), dispersion, is_new=len(hours) < 24)
    return found
