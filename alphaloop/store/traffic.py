"""Decoded traffic: jobs by stream, sums by task, and how many of its last jobs were explored.

What is summed comes from the hourly and daily sums, so it takes as long however many jobs there were. What is read job
by job is bounded in number.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, Connection, cast, func, select

from alphaloop.deciding.decision import Reason
from alphaloop.measurements import DecodedJob, Stream
from alphaloop.messages import Purpose
from alphaloop.store.database import Database, Store, columns_of, of_row
from alphaloop.store.job_counts import SHADOW, sums_between
from alphaloop.tables import acceptance_hourly, decode_runs

#: What `decoded_lately` sums.
WINDOW: Final = timedelta(minutes=1)
#: The last jobs of a task that `explored_of` sums: bounds the time of its query, whatever the traffic.
_MAX_SUMMED_JOBS: Final = 20_000
#: Newest jobs of a stream that are read.
_MAX_JOBS_PER_STREAM: Final = 5_000
#: Jobs of all streams together: some 50 MB.
_MAX_JOBS: Final = 100_000
#: Jobs of a task that the database looks at for one of its streams.
_MAX_READ_PER_STREAM: Final = 50_000
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)

_STREAM: Final = tuple(field.name for field in fields(Stream))


@dataclass(frozen=True, slots=True)
class JobSums:
    """Jobs together."""

    num_jobs: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodedLately:
    """Jobs of a task and a purpose that were decoded in the window, and their tokens."""

    task: str
    purpose: str
    num_jobs: int
    num_tokens: int


class TrafficStore(Store):
    """Reads decoded traffic."""

    def streams(
        self,
        since: datetime,
        until: datetime,
        *,
        max_jobs: int = _MAX_JOBS_PER_STREAM,
        max_all_jobs: int = _MAX_JOBS,
        max_read: int = _MAX_READ_PER_STREAM,
    ) -> dict[Stream, list[DecodedJob]]:
        """Traffic decoded in (since, until], by stream, oldest job first; of each stream its newest jobs.

        The sums say where they are. A stream has at most `max_jobs` and its share of `max_all_jobs`; small streams
        leave the rest of their shares to the others. At most about `max_read` jobs of a task are looked at for one of
        its streams, up to the stream's newest, so a rare stream of a busy task begins later.
        """
        by_stream: dict[Stream, list[DecodedJob]] = {}
        with self._database.begin() as connection:
            stretches = _stretches(connection, since, until)
            of_tasks: dict[str, Counter[datetime]] = defaultdict(Counter)
            for stream, by_start in stretches.items():
                of_tasks[stream.task].update(by_start)
            limits = shares({stream: min(max_jobs, sum(n.values())) for stream, n in stretches.items()}, max_all_jobs)
            for stream in sorted(limits):
                newest = max(stretches[stream])
                until_then = {start: n for start, n in of_tasks[stream.task].items() if start <= newest}
                begin = max(since, first_start(stretches[stream], limits[stream]), first_start(until_then, max_read))
                end = min(until, newest + _DAY)
                if jobs := _newest(connection, stream, begin, end, limits[stream]):
                    by_stream[stream] = jobs
        return by_stream

    def num_jobs(self, since: datetime, until: datetime) -> dict[str, int]:
        """By task, its jobs of traffic in the hours that began in (since, until]."""
        with self._database.begin() as connection:
            sums = sums_between(connection, since, until).c
            query = (
                select(sums.task, cast(func.sum(sums.num_jobs), BigInteger))
                .where(*_is_traffic(sums))
                .group_by(sums.task)
            )
            return {task: number for task, number in connection.execute(query)}

    def last_decoded_at(self, until: datetime) -> datetime | None:
        """When the newest job of traffic was decoded; its hour where the job itself was deleted. None before any.

        The hourly sums say in which hour to look.
        """
        hours, runs = acceptance_hourly.c, decode_runs.c
        newest_hour = select(func.max(hours.bucket)).where(hours.bucket <= until, *_is_traffic(hours))
        with self._database.begin() as connection:
            hour: datetime | None = connection.execute(newest_hour).scalar_one()
            if hour is None:
                return None
            newest_job = select(func.max(runs.decoded_at)).where(
                runs.purpose == Purpose.TRAFFIC,
                runs.decoded_at >= hour,
                runs.decoded_at < min(hour + _HOUR, until + timedelta(microseconds=1)),
            )
            return connection.execute(newest_job).scalar_one() or hour

    def num_tokens(self, since: datetime, until: datetime) -> dict[str, int]:
        """By task, tokens that its traffic generated in the hours that began in (since, until]."""
        hours = acceptance_hourly.c
        query = (
            select(hours.task, cast(func.sum(hours.num_tokens), BigInteger))
            .where(hours.bucket > since, hours.bucket <= until, *_is_traffic(hours))
            .group_by(hours.task)
        )
        return {task: number for task, number in self._database.rows(query)}

    def num_jobs_since(self, task: str, sampling_bucket: str, moment: datetime) -> int:
        """Jobs of the task's traffic in the hours after that of `moment`."""
        hours = acceptance_hourly.c
        query = select(func.coalesce(func.sum(hours.num_jobs), 0)).where(
            hours.task == task,
            hours.sampling_bucket == sampling_bucket,
            hours.bucket > moment,
            *_is_traffic(hours),
        )
        return int(self._database.scalar(query))

    def explored_of(
        self,
        task: str,
        target_revision: str,
        engine: str,
        device: str,
        sampling_bucket: str,
        form_bucket: str,
        since: datetime,
        until: datetime,
    ) -> tuple[JobSums, JobSums]:
        """The last jobs of the traffic decoded in (since, until]: those that were explored, and all of them."""
        runs = decode_runs.c
        last = (
            select(runs.num_tokens, (runs.reason == Reason.EXPLORING).label("is_explored"))
            .where(runs.purpose == Purpose.TRAFFIC, runs.decoded_at > since, runs.decoded_at <= until)
            .where(
                runs.task == task,
                runs.target_revision == target_revision,
                runs.engine == engine,
                runs.device == device,
                runs.sampling_bucket == sampling_bucket,
                runs.form_bucket == form_bucket,
            )
            .order_by(runs.decoded_at.desc())
            .limit(_MAX_SUMMED_JOBS)
            .subquery()
        )
        sums = func.count(), cast(func.sum(last.c.num_tokens), BigInteger)
        rows = self._database.rows(select(last.c.is_explored, *sums).group_by(last.c.is_explored))
        by_origin = {is_explored: JobSums(*numbers) for is_explored, *numbers in rows}
        explored, others = (by_origin.get(is_explored) or JobSums(0, 0) for is_explored in (True, False))
        return explored, JobSums(explored.num_jobs + others.num_jobs, explored.num_tokens + others.num_tokens)

    def tasks(self) -> list[str]:
        """Every task that history knows."""
        return sorted(self._database.scalars(select(acceptance_hourly.c.task).distinct()))


def decoded_lately(database: Database) -> list[DecodedLately]:
    """Jobs and tokens by task and purpose, in the order of names; by the clock of the database."""
    runs = decode_runs.c
    query = (
        select(runs.task, runs.purpose, func.count(), cast(func.sum(runs.num_tokens), BigInteger))
        .where(runs.decoded_at > func.now() - WINDOW)
        .group_by(runs.task, runs.purpose)
        .order_by(runs.task, runs.purpose)
    )
    return [DecodedLately(*row) for row in database.rows(query)]


def shares(wanted: Mapping[Stream, int], available: int) -> dict[Stream, int]:
    """How many jobs of each stream are read: all that are wanted, or as equally as what is available allows."""
    by_stream: dict[Stream, int] = {}
    for number, stream in enumerate(sorted(wanted, key=lambda one: (wanted[one], one))):
        by_stream[stream] = min(wanted[stream], available // (len(wanted) - number))
        available -= by_stream[stream]
    return {stream: number for stream, number in by_stream.items() if number}


def first_start(num_jobs: Mapping[datetime, int], enough: int) -> datetime:
    """The moment after which the newest `enough` jobs are: just before an hour, or before a settled day."""
    seen, begin = 0, datetime.max.replace(tzinfo=UTC)
    for begin in sorted(num_jobs, reverse=True):
        seen += num_jobs[begin]
        if seen >= enough:
            break
    return begin - timedelta(microseconds=1)


def _stretches(connection: Connection, since: datetime, until: datetime) -> dict[Stream, dict[datetime, int]]:
    """Jobs of traffic by stream, and by the start of an hour or of a settled day."""
    sums = sums_between(connection, since - _HOUR, until).c
    query = (
        select(*(sums[name] for name in _STREAM), sums.bucket, cast(func.sum(sums.num_jobs), BigInteger))
        .where(*_is_traffic(sums))
        .group_by(*(sums[name] for name in _STREAM), sums.bucket)
    )
    by_stream: dict[Stream, dict[datetime, int]] = {}
    for *stream, start, num_jobs in connection.execute(query):
        by_stream.setdefault(Stream(*stream), {})[start] = num_jobs
    return by_stream


def _newest(
    connection: Connection, stream: Stream, since: datetime, until: datetime, max_jobs: int
) -> list[DecodedJob]:
    """The newest jobs of a stream from `since` on, oldest first."""
    runs = decode_runs.c
    query = (
        select(*columns_of(decode_runs, DecodedJob))
        .where(*(runs[name] == getattr(stream, name) for name in _STREAM))
        .where(runs.purpose == Purpose.TRAFFIC, runs.decoded_at > since, runs.decoded_at <= until)
        .order_by(runs.decoded_at.desc(), runs.ledger_id.desc())
        .limit(max_jobs)
    )
    return [of_row(DecodedJob, row) for row in connection.execute(query)][::-1]


def _is_traffic(sums: Any) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Conditions on rows of hourly or daily sums, given by their columns: jobs of traffic, each once."""
    return sums.purpose == Purpose.TRAFFIC, sums.mode != SHADOW
