"""How much slower a sequence gets on as more of them share the device, from the jobs of a time. Pure.

A job's device seconds depend on the load at which it ran: a round of two sequences takes hardly less time than a round
of ten, and each of the two has half of it. So device seconds of idle hours say nothing of a full device. What can be
compared is the time a token, between jobs of one task on one kind of device at different loads. It has everything in it
that the device does for a token: the pass, drafts at the k of that load, and the reading of prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Self

#: Loads are pooled by steps of this factor.
_STEP: Final = math.sqrt(2)
#: Sequences of a task at a load, below which their time a token is not compared.
_LEAST: Final = 5


@dataclass(frozen=True, slots=True)
class DecodedJobs:
    """Jobs of one task that came in the same minute and took about as long, on average."""

    task: str
    device: str
    is_speculative: bool
    arrived_s: float  #: seconds after the beginning of the time that was seen
    num_jobs: int
    num_texts: int  #: of each job: sequences that run at the same time
    num_tokens: int  #: of all of them together
    wall_s: float  #: seconds of decoding of each
    load: float  #: sequences that shared their rounds, the job's own among them: ≥ 1

    @property
    def num_sequences(self) -> int:
        """All texts of all jobs."""
        return self.num_jobs * self.num_texts


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """The time a token of a sequence at ascending loads, over that at the least of them, which is 1.

    Neither it nor the device's tokens a second fall with the load.
    """

    loads: tuple[float, ...]
    slowness: tuple[float, ...]

    def at(self, load: float) -> float:
        """The slowness at a load, linear in between.

        Loads that were never seen are taken for the worse: below the least a sequence is no faster, above the greatest
        a device puts out no more tokens a second.
        """
        if load <= self.loads[0]:
            return self.slowness[0]
        for (low, slow), (high, slower) in pairwise(zip(self.loads, self.slowness, strict=True)):
            if load <= high:
                return slow + (slower - slow) * (load - low) / (high - low)
        return self.slowness[-1] * load / self.loads[-1]

    @classmethod
    def of_jobs(cls, jobs: Sequence[DecodedJobs]) -> Self:
        """From at least one job.

        From the least load on, each load's slowness is the mean over tasks and devices, weighted by sequences, of how
        much longer a token took there than at the lesser loads at which the same task was seen on the same device.
        Where none was, the device is taken to gain nothing by the load.
        """
        pools = _pooled(jobs)
        loads, slowness = [pools[0].load], [1.0]
        alone: dict[tuple[str, str], _Mean] = defaultdict(_Mean)  # ln(seconds a token) at a slowness of 1
        for pool in pools:
            if pool.load > loads[-1]:
                most = slowness[-1] * pool.load / loads[-1]
                compared = _Mean()
                for kind, seen in pool.by_kind.items():
                    if alone[kind].weight:
                        compared.add(seen.mean - alone[kind].mean, min(seen.weight, alone[kind].weight))
                grown = math.exp(compared.mean) if compared.weight else most
                loads.append(pool.load)
                slowness.append(min(most, max(slowness[-1], grown)))
            for kind, seen in pool.by_kind.items():
                alone[kind].add(seen.mean - math.log(slowness[-1]), seen.weight)
        return cls(tuple(loads), tuple(slowness))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Sequences that come at the same time, and what each has to do."""

    at_s: float
    alone_s: float  #: seconds of decoding at a slowness of 1
    number: int

    def faster(self, speedup: float) -> Self:
        """The same sequences, so many times as fast."""
        return replace(self, alone_s=self.alone_s / speedup)


def arrivals_of(jobs: DecodedJobs, curve: LoadCurve) -> Arrivals:
    """What these jobs would have done without others."""
    return Arrivals(jobs.arrived_s, jobs.wall_s / curve.at(jobs.load), jobs.num_sequences)


@dataclass(slots=True)
class _Mean:
    """A weighted mean."""

    sum: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        """One more."""
        self.sum += value * weight
        self.weight += weight

    @property
    def mean(self) -> float:
        """0 without any."""
        return self.sum / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class _Pool:
    """Sequences at about the same load, by task and device: their ln(seconds a token)."""

    load: float
    by_kind: dict[tuple[str, str], _Mean]


def _pooled(jobs: Sequence[DecodedJobs]) -> list[_Pool]:
    """Pools in the order of their loads. Tasks with few sequences in a pool are left out of it, unless all are."""
    by_step: dict[int, list[DecodedJobs]] = defaultdict(list)
    for decoded in jobs:
        by_step[round(math.log(decoded.load, _STEP))].append(decoded)
    pools = [_pool(of_step) for _, of_step in sorted(by_step.items())]
    return [pool for pool in pools if pool.by_kind] or [_pool(jobs, least=0)]


def _pool(jobs: Sequence[DecodedJobs], least: int = _LEAST) -> _Pool:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for decoded in jobs:
        of_kind = sums[decoded.task, decoded.device]
        of_kind[0] += decoded.wall_s * decoded.num_sequences
        of_kind[1] += decoded.num_tokens
        of_kind[2] += decoded.num_sequences
    by_kind = {
        kind: _Mean(math.log(sequence_s / num_tokens) * number, number)
        for kind, (sequence_s, num_tokens, number) in sums.items()
        if number >= least and sequence_s and num_tokens
    }
    number = sum(decoded.num_sequences for decoded in jobs)
    return _Pool(sum(decoded.load * decoded.num_sequences for decoded in jobs) / number, by_kind)
