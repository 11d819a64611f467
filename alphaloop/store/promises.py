"""Promised ends of batches: what they are made from, the newest of each batch, and what came of earlier ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.messages import Purpose
from alphaloop.store.database import Database, Store, columns_of, of_row, values_of
from alphaloop.store.job_counts import SHADOW
from alphaloop.tables import acceptance_hourly, promised_ends
from alphaloop.wording import expected_end

#: Newest decoded jobs of a task that are read, and how far back.
MOST_LATELY: Final = 1000
LATELY: Final = timedelta(days=1)
#: Whole hours of arrivals that are read.
HOURS: Final = timedelta(days=7)
#: Ended batches whose promises correct the next ones, the newest.
MOST_KEPT: Final = 200
_SAMPLE: Final = 200  # claimed jobs of a batch that say in which tasks and segments it is


@dataclass(frozen=True, slots=True)
class PromisedEnd:
    """When a batch was said to end. `why`: why that was not known; then the times are None."""

    batch_id: str
    promised_at: datetime
    num_total: int
    num_open: int
    ends_at: datetime | None = None
    earliest_at: datetime | None = None  #: of the 95 % interval
    latest_at: datetime | None = None
    median_s: float | None = None  #: from `promised_at`, before earlier promises were looked at
    sd_s: float | None = None
    why: str | None = None
    ended_at: datetime | None = None

    def sentence(self) -> str:
        """`ends 02:40, 02:31 to 02:55 UTC`, or why that is not known."""
        if self.ends_at is None or self.earliest_at is None or self.latest_at is None:
            return f"its end is not known: {self.why}"
        return expected_end(self.ends_at, self.earliest_at, self.latest_at, self.promised_at)

    def as_json(self) -> dict[str, Any]:
        """What was said, without what it was made from; moments in UTC, the same text on every screen."""
        said = values_of(self, "batch_id", "median_s", "sd_s", "ended_at")
        return {n: v.astimezone(UTC).isoformat() if isinstance(v, datetime) else v for n, v in said.items()}


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where the requests of a batch are: how many of a sample are of each task and segment, and when they expire."""

    num_by_line: Mapping[tuple[str, str], int]
    expires_at: datetime | None


class PromiseStore(Store):
    """The table of promised ends."""

    def keep(self, promises: Iterable[PromisedEnd]) -> None:
        """Write what was said."""
        if rows := [values_of(promise) for promise in promises]:
            self._database.change(insert(promised_ends).on_conflict_do_nothing(), rows)

    def end(self, batch_ids: Collection[str]) -> None:
        """These batches have ended now: their promises can be judged."""
        is_open = promised_ends.c.batch_id.in_(list(batch_ids)) & promised_ends.c.ended_at.is_(None)
        self._database.change(update(promised_ends).where(is_open).values(ended_at=func.clock_timestamp()))

    def open(self) -> set[str]:
        """Batches with promises that have not ended, as far as was written."""
        query = select(promised_ends.c.batch_id).where(promised_ends.c.ended_at.is_(None)).distinct()
        return set(self._database.scalars(query))

    def ended(self) -> list[PromisedEnd]:
        """Promises of the newest batches that have ended, of each the first in every quarter of its requests.

        A batch of the API whose time was over, or that was cancelled, says nothing of how long its requests take.
        """
        return [of_row(PromisedEnd, row) for row in self._database.rows(_ENDED, {"limit": MOST_KEPT})]

    def of_batch(self, batch_id: str) -> list[PromisedEnd]:
        """The history of a batch, oldest first."""
        query = select(*_COLUMNS).where(promised_ends.c.batch_id == batch_id).order_by(promised_ends.c.promised_at)
        return [of_row(PromisedEnd, row) for row in self._database.rows(query)]

    def decoded_lately(self, tasks: Collection[str]) -> Sequence[Any]:
        """The newest jobs of traffic of these tasks, as `alphaloop.batches.ends.LatelyDecoded` names their columns."""
        given = {"tasks": sorted(tasks), "lately": LATELY, "limit": MOST_LATELY, "purpose": Purpose.TRAFFIC.value}
        return self._database.rows(_LATELY, given)

    def jobs_by_hour(self, tasks: Collection[str], now: datetime) -> Mapping[tuple[str, str], Mapping[int, float]]:
        """By task and segment, jobs of traffic by hour since 1970."""
        hours = acceptance_hourly.c
        query = (
            select(hours.task, hours.segment, func.extract("epoch", hours.bucket), func.sum(hours.num_jobs))
            .where(hours.task.in_(sorted(tasks)), hours.bucket > now - HOURS, hours.bucket <= now)
            .where(hours.purpose == Purpose.TRAFFIC, hours.mode != SHADOW)
            .group_by(hours.task, hours.segment, hours.bucket)
        )
        by_line: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for task, segment, second, num_jobs in self._database.rows(query):
            by_line[task, segment][int(second) // 3600] = float(num_jobs)
        return by_line

    def places(self, batch_ids: Collection[str]) -> dict[str, BatchPlace]:
        """Where the requests of batches are: by claimed jobs, else as the API's key or the sender said."""
        by_batch: defaultdict[str, dict[tuple[str, str], int]] = defaultdict(dict)
        expires: dict[str, datetime | None] = {}
        for row in self._database.rows(_PLACES, {"ids": list(batch_ids), "sample": _SAMPLE}):
            expires[row.id] = row.expires_at
            if row.task is not None:
                by_batch[row.id][row.task, row.segment] = int(row.num_jobs)
        return {name: BatchPlace(by_batch[name], expires[name]) for name in expires}


def newest_promises(database: Database, batch_ids: Collection[str]) -> dict[str, PromisedEnd]:
    """What was said last of each of these batches, by id."""
    rows = database.rows(_NEWEST, {"ids": list(batch_ids)}) if batch_ids else ()
    return {row.batch_id: of_row(PromisedEnd, row) for row in rows}


_COLUMNS: Final = tuple(columns_of(promised_ends, PromisedEnd))
_NEWEST: Final = text("""
    SELECT newest.* FROM unnest(CAST(:ids AS text[])) AS asked (id)
    CROSS JOIN LATERAL (
        SELECT * FROM promised_ends WHERE batch_id = asked.id ORDER BY promised_at DESC LIMIT 1
    ) AS newest
""")
_ENDED: Final = text("""
    WITH newest AS (
        SELECT batch_id, max(ended_at) AS ended_at FROM promised_ends WHERE ended_at IS NOT NULL
        GROUP BY batch_id ORDER BY 2 DESC LIMIT :limit
    )
    SELECT DISTINCT ON (said.batch_id, 4 * said.num_open / greatest(said.num_total, 1)) said.*
    FROM promised_ends AS said JOIN newest USING (batch_id) LEFT JOIN api_batches ON api_batches.id = said.batch_id
    WHERE said.why IS NULL AND said.ended_at IS NOT NULL
        AND coalesce(api_batches.status, '') NOT IN ('expired', 'cancelling', 'cancelled')
    ORDER BY said.batch_id, 4 * said.num_open / greatest(said.num_total, 1), said.promised_at
""")
_LATELY: Final = text("""
    SELECT runs.task, runs.segment, runs.batch_id, runs.decoded_s - runs.queue_s - runs.wall_s AS arrived_s,
        runs.decoded_s, runs.wall_s, runs.device_s
    FROM unnest(CAST(:tasks AS text[])) AS asked (task)
    CROSS JOIN LATERAL (
        SELECT task, segment, batch_id, extract(epoch FROM decoded_at)::float8 AS decoded_s, queue_s, wall_s, device_s
        FROM decode_runs
        WHERE task = asked.task AND purpose = :purpose AND decoded_at > now() - CAST(:lately AS interval)
        ORDER BY decoded_at DESC LIMIT :limit
    ) AS runs
""")
# A sample, because a batch may have 50,000 requests and is asked for every few seconds.
_PLACES: Final = text("""
    SELECT asked.id, api_batches.expires_at, place.task, place.segment, place.num_jobs
    FROM unnest(CAST(:ids AS text[])) AS asked (id)
    LEFT JOIN api_batches ON api_batches.id = asked.id
    LEFT JOIN batches ON batches.id = asked.id
    LEFT JOIN LATERAL (
        SELECT sample.task, sample.segment, count(*) AS num_jobs
        FROM (SELECT task, segment FROM jobs WHERE batch_id = asked.id LIMIT :sample) AS sample
        GROUP BY sample.task, sample.segment
        UNION ALL
        SELECT coalesce(api_batches.task, api_batches.tasks[1], batches.task), coalesce(api_batches.segment, ''), 1
        WHERE NOT EXISTS (SELECT FROM jobs WHERE batch_id = asked.id)
    ) AS place ON true
""")
