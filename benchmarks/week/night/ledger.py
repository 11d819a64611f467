"""What the database says of the night: jobs that ended, how they were decoded, and promised ends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg

from alphaloop.capacity.curve import DecodedJobs
from benchmarks.week.night.schedule import Planned
from benchmarks.week.world import Stream

STAGES: Final = (0.0, 0.25, 0.5, 0.75)  #: shares of a batch that had ended when its end was promised


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a job, of a worker or of the simulator. Times are seconds after the first job was sent."""

    stream: Stream
    batch_id: str | None
    at_s: float
    deadline_s: float  #: inf: none
    ended_s: float  #: with a text; inf: none
    decoded: DecodedJobs | None

    @property
    def is_met(self) -> bool:
        """Whether it ended with a text by its deadline."""
        return self.ended_s <= self.deadline_s < math.inf


@dataclass(frozen=True, slots=True)
class Said:
    """A promised end of a batch and what came, in seconds after the first job was sent."""

    batch_id: str
    share: float  #: of its requests, had ended
    at_s: float
    low_s: float
    high_s: float
    came_s: float

    @property
    def holds(self) -> bool:
        """Whether the interval holds the end."""
        return self.low_s <= self.came_s <= self.high_s

    @property
    def half_width(self) -> float:
        """Of the interval, over what remained then."""
        return (self.high_s - self.low_s) / 2 / max(1e-9, self.came_s - self.at_s)


def by_stage(said: Sequence[Said]) -> dict[float, list[Said]]:
    """By stage, the first promise of each batch from then on."""
    stages: dict[float, dict[str, Said]] = {stage: {} for stage in STAGES}
    for promise in sorted(said, key=lambda promise: promise.at_s):
        for stage, of in stages.items():
            if promise.share >= stage:
                of.setdefault(promise.batch_id, promise)
    return {stage: list(of.values()) for stage, of in stages.items()}


class Ledger:
    """Reads a database of the night; its connection is the reader's own."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def of(cls, url: str) -> Iterator[Ledger]:
        """Of the database at `url`."""
        with psycopg.connect(url, autocommit=True) as connection:
            yield cls(connection)

    def num_ended(self) -> int:
        """Jobs with a recorded outcome."""
        (row,) = self._connection.execute("SELECT count(*) FROM jobs WHERE finished_at IS NOT NULL")
        return int(row[0])

    def statuses(self) -> dict[str, int]:
        """Jobs by status."""
        return dict(self._connection.execute("SELECT status, count(*) FROM jobs GROUP BY status ORDER BY status"))

    def num_decoded_again(self) -> int:
        """Jobs that a worker died with, and another took up."""
        (row,) = self._connection.execute("SELECT count(*) FROM jobs WHERE num_crashes > 0")
        return int(row[0])

    def full_device_s(self) -> float:
        """Device seconds of a job while the slots were full: the mean of the later half of those decoded so far.

        The earlier half still tried draft lengths and learned costs.
        """
        (row,) = self._connection.execute(_FULL)
        if row[0] is None:
            raise RuntimeError("expected decoded jobs, found none")
        return float(row[0])

    def ended(self, jobs: Sequence[Planned], sent_at: Mapping[str, float], zero: float) -> list[Ended]:
        """What became of these jobs. Raises RuntimeError where one has no outcome."""
        rows = {row[0]: row[1:] for row in self._connection.execute(_ENDED)}
        ended = []
        for job in jobs:
            if job.job_id not in rows:
                raise RuntimeError(f"{job.job_id}: expected an outcome, found none")
            status, finished_s, *run = rows[job.job_id]
            at_s = sent_at[job.job_id] - zero
            ended_s = finished_s - zero if status == "succeeded" else math.inf
            decoded = _decoded(job, at_s, *run) if status == "succeeded" and run[0] is not None else None
            ended.append(Ended(job.stream, job.batch_id, at_s, at_s + job.within_s, ended_s, decoded))
        return ended

    def promises(self, ended: Sequence[Ended], zero: float) -> list[Said]:
        """Every promise that was made of the ends of these jobs' batches, oldest first."""
        came_s: defaultdict[str, float] = defaultdict(float)
        ends = {row[0]: row[1] - zero for row in self._connection.execute(_LAST)}
        for job in ended:
            if job.batch_id is not None:
                came_s[job.batch_id] = ends[job.batch_id]
        return [
            Said(batch_id, 1 - num_open / max(1, num_total), at - zero, low - zero, high - zero, came_s[batch_id])
            for batch_id, num_total, num_open, at, low, high in self._connection.execute(_PROMISES)
            if batch_id in came_s
        ]


def _decoded(
    job: Planned, at_s: float, num_tokens: int, wall_s: float, device_s: float, device: str, is_speculative: bool
) -> DecodedJobs:
    load = max(1.0, wall_s / device_s)
    return DecodedJobs(job.stream.task, device, is_speculative, at_s, 1, 1, num_tokens, wall_s, load)


_FULL: Final = """
    WITH runs AS (
        SELECT device_s, wall_s / device_s AS load, percent_rank() OVER (ORDER BY decoded_at) AS place
        FROM decode_runs WHERE device_s > 0
    )
    SELECT avg(device_s) FROM runs WHERE place >= 0.5 AND load >= 0.75 * (SELECT max(load) FROM runs)
"""
_ENDED: Final = """
    SELECT jobs.job_id, jobs.status, extract(epoch FROM jobs.finished_at)::float8,
        runs.num_tokens, runs.wall_s, runs.device_s, runs.device, runs.mode = 'speculative'
    FROM jobs LEFT JOIN decode_runs AS runs ON runs.job_id = jobs.job_id AND runs.attempt = jobs.attempt
    WHERE jobs.finished_at IS NOT NULL
"""
_LAST: Final = """
    SELECT batch_id, extract(epoch FROM max(finished_at))::float8 FROM jobs WHERE batch_id IS NOT NULL GROUP BY batch_id
"""
_PROMISES: Final = """
    SELECT batch_id, num_total, num_open, extract(epoch FROM promised_at)::float8,
        extract(epoch FROM earliest_at)::float8, extract(epoch FROM latest_at)::float8
    FROM promised_ends WHERE why IS NULL ORDER BY promised_at
"""
