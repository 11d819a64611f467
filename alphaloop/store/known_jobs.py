"""Jobs and batches as people look them up: by id or page by page; which letters became jobs; whether all adds up.

Batches of the API and those that came through Kafka have a table each. Both tables hold what became of the requests
when a scheduler counted them last, so a list of batches reads no job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Row,
    and_,
    delete,
    func,
    literal_column,
    or_,
    select,
    text,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Database, Store, columns_of, of_row
from alphaloop.store.job_counts import DRAFTED_ROUNDS, ROUNDS
from alphaloop.store.promises import PromisedEnd, newest_promises
from alphaloop.store.workers import SILENT_AFTER
from alphaloop.tables import api_batches, batches, decode_runs, jobs, redrives, workers


@dataclass(frozen=True, slots=True)
class KnownJob:
    """Everything that the database knows of a job that a worker has claimed at least once.

    `outcome` is the recorded Result, None while the job runs. `num_tokens` and `silence` are what its worker said last,
    and how long ago: None where it did not say that it decodes the job.
    """

    job_id: str
    task: str
    status: str
    attempt: int
    num_crashes: int
    num_failures: int
    owner: str | None
    lease_expires_at: datetime | None
    is_held: bool | None  #: whether the lease is not over
    created_at: datetime
    finished_at: datetime | None
    outcome: bytes | None
    num_tokens: int | None
    silence: timedelta | None
    is_cancelling: bool
    batch_id: str | None = None


def known_jobs(database: Database, job_ids: Collection[str]) -> dict[str, KnownJob]:
    """Those of the jobs that a worker has claimed, by job_id."""
    rows = database.rows(_CLAIMED, {"job_ids": list(job_ids)})
    return {row.job_id: of_row(KnownJob, row, outcome=row.outcome and row.outcome.encode()) for row in rows}


def pages_of_batch(database: Database, batch_id: str) -> Iterator[list[tuple[str, str | None]]]:
    """job_id and custom_id of every job of a batch that a worker has claimed, in the order of their first claims.

    Read a page at a time.
    """
    last: tuple[datetime, str] | None = None
    while True:
        query = (
            select(jobs.c.job_id, jobs.c.custom_id, jobs.c.created_at)
            .where(jobs.c.batch_id == batch_id)
            .order_by(jobs.c.created_at, jobs.c.job_id)
            .limit(_PAGE)
        )
        if last is not None:
            query = query.where(tuple_(jobs.c.created_at, jobs.c.job_id) > last)
        page = database.rows(query)
        if page:
            yield [(job_id, custom_id) for job_id, custom_id, _ in page]
            last = page[-1].created_at, page[-1].job_id
        if len(page) < _PAGE:
            return


@dataclass(frozen=True, slots=True)
class HowDecoded:
    """How the job was decoded that gave the recorded outcome."""

    mode: str  #: vanilla or speculative
    drafter: str | None
    num_draft_tokens: int
    num_rounds: int  #: those after the prefill of each text, which alone can draft
    drafted_share: float | None  #: of these; None without any
    num_tokens: int  #: generated
    latency_s: float  #: from the message's timestamp in Kafka to the last token


@dataclass(frozen=True, slots=True)
class ListedJob:
    """The row of a job, without its payload and its outcome."""

    job_id: str
    task: str
    segment: str
    custom_id: str | None
    batch_id: str | None
    purpose: str
    status: str
    attempt: int
    num_crashes: int
    num_failures: int
    owner: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    finished_at: datetime | None
    decoded: HowDecoded | None = None  #: None before the outcome, and where nothing was decoded for it


@dataclass(frozen=True, slots=True)
class PageStart:
    """The job after which a page of the newest jobs begins."""

    created_at: datetime
    job_id: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs are listed: those of a task, with a status, that were claimed first between two moments."""

    task: str | None = None
    status: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def walks(self) -> bool:
        """Whether jobs have to be walked over that are not so: no index knows a task or a status."""
        return self.task is not None or self.status is not None

    def is_within(self, table: FromClause) -> ColumnElement[bool]:
        """The times, for which there is an index."""
        at = table.c.created_at
        bounds = (at >= self.since if self.since else true()), (at <= self.until if self.until else true())
        return and_(*bounds)

    def is_so(self, table: FromClause) -> ColumnElement[bool]:
        """The rest."""
        named = {"task": self.task, "status": self.status}
        return and_(*(table.c[name] == value if value is not None else true() for name, value in named.items()))


@dataclass(frozen=True, slots=True)
class JobPage:
    """The newest jobs that were wanted, newest first."""

    jobs: list[ListedJob]
    next_page: PageStart | None  #: where the next page begins; None where there is nothing more
    num_walked: int  #: jobs that were looked at, those that are not so included


#: The longest that a page looks for jobs that are so. It then shows what it found, and a link to the rest.
LOOK_S: Final = 1.0
_ALL: Final = Wanted()


class JobPages:
    """Reads jobs. Every page is found by an index, and none is counted out."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock

    def newest(self, limit: int, wanted: Wanted = _ALL, *, after: PageStart | None = None) -> JobPage:
        """The wanted jobs that were claimed first most recently.

        Walks over the others for LOOK_S: a page may have fewer than `limit` jobs, or none, and still have a next one.
        """
        listed, num_walked, ends_at = list[ListedJob](), 0, self._clock() + LOOK_S
        num_rows = _FIRST_ROWS if wanted.walks else limit + 1
        while True:
            rows = self._walk(num_rows, limit + 1 - len(listed), wanted, after)
            listed += [of_row(ListedJob, row, decoded=None) for row in rows if row.is_so]
            num_walked += rows[-1].number if rows else 0
            if len(listed) > limit:
                shown = listed[:limit]
                return JobPage(self._with_decoded(shown), _place(shown[-1]), num_walked)
            if not rows or rows[-1].number < num_rows:
                return JobPage(self._with_decoded(listed), None, num_walked)
            after = _place(rows[-1])
            if self._clock() >= ends_at:
                return JobPage(self._with_decoded(listed), after, num_walked)
            num_rows = _MORE_ROWS

    def _walk(self, num_rows: int, limit: int, wanted: Wanted, after: PageStart | None) -> Sequence[Row[Any]]:
        """The wanted of the next `num_rows` jobs, at most `limit`, and the last of these jobs; each with its number.

        The last is left out where `limit` is reached before it.
        """
        query = select(*_COLUMNS).where(wanted.is_within(jobs))
        if after is not None:
            # The first condition is the index's, the second one orders jobs of the same moment.
            query = query.where(
                jobs.c.created_at <= after.created_at,
                tuple_(jobs.c.created_at, jobs.c.job_id) < tuple_(after.created_at, after.job_id),
            )
        newest_first = query.order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(num_rows).subquery()
        number = func.row_number().over(order_by=(newest_first.c.created_at.desc(), newest_first.c.job_id.desc()))
        walked = select(newest_first, wanted.is_so(newest_first).label("is_so"), number.label("number")).cte("walked")
        last = select(func.max(walked.c.number)).scalar_subquery()
        chosen = select(walked).where(or_(walked.c.is_so, walked.c.number == last)).order_by(walked.c.number)
        return self._database.rows(chosen.limit(limit))

    def of_batch(self, batch_id: str, limit: int, wanted: Wanted = _ALL, *, after: str = "") -> list[ListedJob]:
        """The wanted jobs of a batch that were claimed, whose job_id comes after `after`, in the order of job_id."""
        # Materialized, or the planner may walk the primary key of all jobs for their order.
        is_wanted = and_(jobs.c.batch_id == batch_id, wanted.is_within(jobs), wanted.is_so(jobs))
        batch = select(*_COLUMNS).where(is_wanted).cte("batch")
        query = select(batch).where(batch.c.job_id > after).order_by(batch.c.job_id).limit(limit)
        listed = [of_row(ListedJob, row, decoded=None) for row in self._database.rows(query)]
        return self._with_decoded(listed)

    def find(self, job_id: str) -> ListedJob | None:
        """The job of this id; None where no worker has claimed it."""
        row = self._database.row(select(*_COLUMNS).where(jobs.c.job_id == job_id))
        return None if row is None else self._with_decoded([of_row(ListedJob, row, decoded=None)])[0]

    def _with_decoded(self, found: list[ListedJob]) -> list[ListedJob]:
        ended = [job for job in found if job.finished_at is not None]
        if not ended:
            return found
        runs = decode_runs.c
        columns = (runs.job_id, runs.attempt, runs.mode, func.nullif(runs.drafter, ""), runs.num_draft_tokens)
        rounds: ColumnElement[int] = literal_column(ROUNDS)
        drafted_share: ColumnElement[float | None] = literal_column(f"({DRAFTED_ROUNDS}) / nullif({ROUNDS}, 0)::float8")
        query = select(*columns, rounds, drafted_share, runs.num_tokens, runs.queue_s + runs.wall_s).where(
            runs.job_id.in_([job.job_id for job in ended]),
            # So that older days need not be looked at.
            runs.decoded_at >= min(job.created_at for job in ended) - _CLOCKS_APART,
        )
        by_job = {(job_id, attempt): HowDecoded(*decoded) for job_id, attempt, *decoded in self._database.rows(query)}
        return [replace(job, decoded=by_job.get((job.job_id, job.attempt))) for job in found]


class LetterKey(NamedTuple):
    """Where a dead letter lies, and its timestamp in milliseconds since 1970; 0 if it has none."""

    topic: str
    partition: int
    offset: int
    written_at_ms: int


class RedriveStore(Store):
    """The table of letters that were sent again."""

    def mark(self, job_ids: Mapping[LetterKey, str], batch_ids: Collection[str] = ()) -> None:
        """Note letters that the broker has, with the job each became. Batches of these ids that have ended go on.

        One of the API ends again once the job has: its files are then written anew, if its input file is there.
        """
        if not job_ids:
            return
        rows = [{**key._asdict(), "job_id": job_id} for key, job_id in sorted(job_ids.items())]
        self._database.change(insert(redrives).on_conflict_do_nothing(), rows)
        for go_on in (_API_BATCHES_GO_ON, _BATCHES_GO_ON):
            self._database.change(go_on, {"batch_ids": sorted(set(batch_ids))})

    def of(self, letters: Collection[LetterKey]) -> dict[LetterKey, str]:
        """Those of the letters that were sent again, with the job each became."""
        if not letters:
            return {}
        query = select(*_KEY, redrives.c.job_id).where(tuple_(*_KEY).in_([tuple(key) for key in letters]))
        return {LetterKey(*key): job_id for *key, job_id in self._database.rows(query)}

    def among(self, job_ids: Collection[str]) -> frozenset[str]:
        """Those of the jobs that a letter became."""
        if not job_ids:
            return frozenset()
        query = select(redrives.c.job_id).where(redrives.c.job_id.in_(list(job_ids)))
        return frozenset(self._database.scalars(query))

    def newest_worker(self) -> datetime | None:
        """When the newest of the workers that were heard of lately started."""
        is_heard = workers.c.seen_at > func.clock_timestamp() - SILENT_AFTER
        started_at: datetime | None = self._database.scalar(select(func.max(workers.c.started_at)).where(is_heard))
        return started_at

    def forget_before(self, topic: str, partition: int, offset: int) -> None:
        """Forget the letters below an offset: they were deleted."""
        statement = delete(redrives).where(
            redrives.c.topic == topic, redrives.c.partition == partition, redrives.c.offset < offset
        )
        self._database.change(statement)


@dataclass(frozen=True, slots=True)
class Integrity:
    """The result of one check of jobs."""

    num_jobs: int
    num_outcomes: int
    num_succeeded: int
    num_decoded_once: int  #: of those that succeeded
    num_reused: int  #: of those that succeeded: answered with the text of an equal job, and not decoded
    num_wrong_counts: int  #: decoded jobs whose counts by position do not add up
    num_wrong_tokens: int  #: jobs whose result says another number of tokens than was counted
    num_tokens: int
    num_unpublished: int  #: outcomes of any job that the broker has not acknowledged yet

    @property
    def holds(self) -> bool:
        """Whether every job has one outcome and every count adds up."""
        return (
            self.num_outcomes == self.num_jobs
            and self.num_decoded_once + self.num_reused == self.num_succeeded
            and not (self.num_wrong_counts or self.num_wrong_tokens)
        )


def check(database: Database, since: datetime | None = None) -> Integrity:
    """Check the jobs that were claimed first at `since` or later, by the database's clock; None: every stored job.

    Retention drops old runs; check before that.
    """
    return of_row(Integrity, database.one(_CHECK, {"since": since}))


def claimed_among(database: Database, job_ids: Iterable[str]) -> set[str]:
    """Those of the jobs that a worker has claimed."""
    return set(database.scalars(select(jobs.c.job_id).where(jobs.c.job_id.in_(list(job_ids)))))


def ended_among(database: Database, job_ids: Iterable[str]) -> set[str]:
    """Those of the jobs whose outcome is recorded."""
    asked = text("SELECT job_id FROM jobs WHERE job_id = ANY(:job_ids) AND finished_at IS NOT NULL")
    return {job_id for (job_id,) in database.rows(asked, {"job_ids": list(job_ids)})}


_PAGE: Final = 500
# The worker's row says which of its claims it decodes, and how far it is.
_CLAIMED: Final = text("""
    SELECT jobs.job_id, jobs.task, jobs.batch_id, jobs.status, jobs.attempt, jobs.num_crashes, jobs.num_failures,
        jobs.owner, jobs.lease_expires_at, jobs.lease_expires_at > clock_timestamp() AS is_held, jobs.created_at,
        jobs.finished_at,
        jobs.outcome::text AS outcome, workers.num_tokens[array_position(workers.job_ids, jobs.job_id)] AS num_tokens,
        clock_timestamp() - workers.seen_at AS silence,
        EXISTS (SELECT FROM cancellations WHERE job_id = jobs.job_id AND ends_at >= created_at) AS is_cancelling
    FROM jobs LEFT JOIN workers ON workers.owner = jobs.owner
    WHERE jobs.job_id = ANY(:job_ids)
""")
#: Rows that one statement walks: the first finds what is common, the others what is rare.
_FIRST_ROWS, _MORE_ROWS = 1_000, 20_000
#: Clocks of workers, which write when a job was decoded, and of the database, which writes when it was claimed.
_CLOCKS_APART: Final = timedelta(days=1)
_COLUMNS: Final = tuple(columns_of(jobs, ListedJob, "decoded"))


def _place(job: ListedJob | Row[Any]) -> PageStart:
    return PageStart(job.created_at, job.job_id)


_API_BATCHES_GO_ON: Final = text("""
    UPDATE api_batches SET status = 'finalizing', finalizing_at = clock_timestamp(), look_at = clock_timestamp()
    WHERE id = ANY(:batch_ids) AND status IN ('completed', 'expired', 'cancelled') AND EXISTS (
        SELECT FROM api_files WHERE api_files.id = input_file_id AND api_files.expires_at > clock_timestamp()
    )
""")
_BATCHES_GO_ON: Final = text("UPDATE batches SET is_open = true WHERE id = ANY(:batch_ids) AND NOT is_open")
_KEY = (redrives.c.topic, redrives.c.partition, redrives.c.offset, redrives.c.written_at_ms)
# `<=` and `=` by position: accepts ≤ trials ≤ proposed ≤ rounds, and tokens = rounds + accepted - cropped + forced.
# PostgreSQL reads no field of a JSON document with an escaped NUL in it, which a generated text may hold.
_CHECK: Final = text(r"""
    WITH runs AS (
        SELECT job_id, count(*) AS times, sum(num_tokens)::bigint AS num_tokens,
               bool_and(num_tokens = rounds + array_sum(accepts) - num_cropped + num_forced
                        AND array_ge(proposed, trials) AND array_ge(trials, accepts)
                        AND coalesce(proposed[1], 0) = rounds - num_empty_rounds) AS adds_up
        FROM decode_runs GROUP BY job_id
    )
    SELECT count(*) AS num_jobs,
           count(*) FILTER (WHERE status <> 'running' AND outcome IS NOT NULL) AS num_outcomes,
           count(*) FILTER (WHERE status = 'succeeded') AS num_succeeded,
           count(*) FILTER (WHERE status = 'succeeded' AND runs.times = 1) AS num_decoded_once,
           count(*) FILTER (WHERE status = 'succeeded' AND runs.times IS NULL AND reused_at IS NOT NULL) AS num_reused,
           count(*) FILTER (WHERE runs.job_id IS NOT NULL AND NOT runs.adds_up) AS num_wrong_counts,
           count(*) FILTER (WHERE status = 'succeeded' AND reused_at IS NULL
               AND (replace(outcome::text, '\u0000', '\ufffd')::json #>> '{usage,completion_tokens}')::bigint
                   IS DISTINCT FROM runs.num_tokens)
               AS num_wrong_tokens,
           coalesce(sum(runs.num_tokens), 0)::bigint AS num_tokens,
           (SELECT coalesce(sum(cardinality(job_ids)), 0)::bigint FROM outbox) AS num_unpublished
    FROM jobs LEFT JOIN runs USING (job_id) LEFT JOIN reused_results USING (job_id)
    WHERE CAST(:since AS timestamptz) IS NULL OR jobs.created_at >= :since
""")


@dataclass(frozen=True, slots=True)
class ListedBatch:
    """A batch of the API or of Kafka with its counts."""

    id: str
    source: Literal["api", "command", "console", "kafka"]  #: kafka: any other producer
    by: str | None  #: key of the API, account or login that sent it
    name: str | None  #: of its file
    task: str | None  #: of lines that name none
    num_bytes: int | None  #: of its file
    num_total: int  #: lines with text of its file; 0: not known
    num_invalid: int  #: lines of these that were wrong and not sent
    by_status: Mapping[str, int]
    status: str | None  #: one of the API's; None of any other
    created_at: datetime
    end: PromisedEnd | None = None  #: what was said last of when it ends


class BatchStore(Store):
    """Lists every batch, and keeps the counts of those that did not come through the API."""

    def page(self, limit: int, *, after: tuple[datetime, str] | None = None) -> list[ListedBatch]:
        """The newest, after the batch that was made at this moment and has this id. Raises StoreError."""
        at, batch_id = after or (None, None)
        rows = self._database.rows(_PAGE_OF_BATCHES, {"limit": limit, "at": at, "id": batch_id})
        ends = newest_promises(self._database, [row.id for row in rows])
        return [of_row(ListedBatch, row, end=ends.get(row.id)) for row in rows]

    def find(self, batch_id: str) -> ListedBatch | None:
        """The batch of this id; None where none was submitted, and no worker has claimed a job of it."""
        return self._named([batch_id]).get(batch_id)

    def note(self, told: Mapping[str, str | int], num_invalid: int) -> None:
        """Note a file that is being sent, by columns of `batches`, and how many of its lines were wrong so far."""
        grown = func.greatest(batches.c.num_invalid, num_invalid)
        made = insert(batches).values(**told, num_invalid=num_invalid)
        changed = {**told, "num_invalid": grown, "is_open": True}
        self._database.change(made.on_conflict_do_update(index_elements=["id"], set_=changed))

    def open(self, limit: int, since: datetime | None) -> dict[str, ListedBatch]:
        """Those to be counted: the API's, and of the others at most `limit`, the longest not counted first.

        Batches are among them of which a worker has claimed a job `since` then; without it, since the last count.
        """
        self._database.change(_CLAIMED_BATCHES, {"since": since, "margin": _MARGIN})
        longest_ago = batches.c.counted_at.nulls_first()
        others = select(batches.c.id).where(batches.c.is_open).order_by(longest_ago).limit(limit)
        of_api = select(api_batches.c.id).where(_IS_COUNTED)
        return self._named([*self._database.scalars(of_api), *self._database.scalars(others)])

    def claimed(self, batch_ids: Collection[str]) -> list[tuple[str, str, int, list[str] | None]]:
        """Their jobs that a worker has claimed: batch, status, number, and which ones have failed."""
        return [tuple(row) for row in self._database.rows(_BY_STATUS, {"ids": list(batch_ids)})]

    def keep(self, counts: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what was counted, by batch and column: with `is_open` one that is not the API's."""
        now = {"counted_at": func.clock_timestamp()}
        with self._database.begin() as connection:
            for batch_id, kept in sorted(counts.items()):
                if "is_open" in kept:
                    change = update(batches).where(batches.c.id == batch_id).values({**kept, **now})
                else:
                    change = update(api_batches).where(api_batches.c.id == batch_id, _IS_COUNTED).values(kept)
                connection.execute(change)

    def _named(self, ids: Sequence[str]) -> dict[str, ListedBatch]:
        rows, ends = self._database.rows(_NAMED, {"ids": ids}), newest_promises(self._database, ids)
        return {row.id: of_row(ListedBatch, row, end=ends.get(row.id)) for row in rows}


_LISTED: Final = """
    SELECT api_batches.id, 'api' AS source, api_batches.key_name AS by, filename AS name, task, num_bytes, num_total,
        num_invalid, by_status, status, api_batches.created_at
    FROM api_batches LEFT JOIN api_files ON api_files.id = input_file_id
    UNION ALL
    SELECT id, source, by, name, task, num_bytes, num_total, num_invalid, by_status, NULL, created_at
    FROM batches
"""
_PAGE_OF_BATCHES: Final = text(f"""
    SELECT * FROM ({_LISTED}) AS listed
    WHERE CAST(:at AS timestamptz) IS NULL OR (created_at, id) < (CAST(:at AS timestamptz), CAST(:id AS text))
    ORDER BY created_at DESC, id DESC LIMIT :limit
""")  # noqa: S608 - no values
_NAMED: Final = text(f"SELECT * FROM ({_LISTED}) AS listed WHERE id = ANY(:ids)")  # noqa: S608 - no values
#: What the API's other batches have was counted when their files were written.
_IS_COUNTED: Final = api_batches.c.status.in_(("in_progress", "cancelling"))
_BY_STATUS: Final = text("""
    SELECT batch_id, CASE status WHEN 'running' THEN 'held' ELSE status END AS status, count(*),
        array_agg(job_id) FILTER (WHERE status = 'failed')
    FROM jobs WHERE batch_id = ANY(:ids) GROUP BY batch_id, status
""")
#: A claim is seen when it is committed, which is after it was made.
_MARGIN: Final = timedelta(seconds=10)
# The first look of a process goes on where the last one of any process ended.
_CLAIMED_BATCHES: Final = text("""
    INSERT INTO batches AS known (id, source, created_at)
    SELECT batch_id, 'kafka', min(created_at) FROM jobs
    WHERE batch_id IS NOT NULL AND created_at > CAST(:margin AS interval) * -1 + coalesce(
            CAST(:since AS timestamptz), (SELECT max(counted_at) FROM batches), now() - interval '1 day'
        ) AND NOT EXISTS (SELECT FROM api_batches WHERE api_batches.id = jobs.batch_id)
    GROUP BY batch_id
    ON CONFLICT (id) DO UPDATE SET is_open = true WHERE NOT known.is_open
""")
