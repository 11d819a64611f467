"""Recording outcomes: status, result, counts, evidence and the message to publish, in one transaction or not at all.

Outcomes of several jobs are recorded together, because a commit costs as much for one as for many.

The outbox has the messages that were recorded and that the broker has not acknowledged yet. The worker that records
outcomes publishes them from memory and deletes the row. Rows that grow old were left by workers that died between the
two: another worker takes them over. One row stands for all outcomes of a transaction and topic. Results that the broker
refuses are replaced in the record before anybody has seen them, or set aside here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg
from sqlalchemy import Connection, Table, Text, cast, func, select

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import HALF_LIFE, EvidenceSums
from alphaloop.errors import StoreError
from alphaloop.messages import Status
from alphaloop.probes import ProbeText
from alphaloop.store.database import Database, Store, any_of, driver_of
from alphaloop.store.decision_inputs import StateRow, add_jobs, lock_keys
from alphaloop.store.housekeeping import KnownDays, utc_day
from alphaloop.store.job_counts import DecodeRun, JobCounts, ShadowRun, add_to_hours
from alphaloop.store.probes import record_texts
from alphaloop.store.reuse import Reused, check_sources, record_reuse
from alphaloop.store.task_memory import ResultToRemember, remember
from alphaloop.tables import decode_runs, evidence_rows, jobs, outbox


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a claimed job ended. `result` is the Result message's JSON; `run` is None when nothing was decoded.

    `headers` are those that the job's message hands on to the result.
    """

    job_id: str
    attempt: int
    status: str
    result: bytes
    topic: str
    headers: Mapping[str, str]
    run: DecodeRun | None = None
    shadows: tuple[ShadowRun, ...] = ()  #: of drafters that did not decode it as far as they could, each at most once
    probe_text: ProbeText | None = None  #: of a probe or control that was decoded greedily
    remembered: ResultToRemember | None = None  #: of a job whose task has a memory
    reuse_key: bytes | None = None  #: of a decoded job whose text may answer equal jobs
    reused: Reused | None = None  #: of a job that is answered so

    @property
    def counted(self) -> JobCounts:
        """The counts of the job."""
        return JobCounts(self.job_id, self.attempt, self.run, self.shadows)


@dataclass(eq=False)
class OutcomeStore:
    """Records outcomes. The evidence that they add to fades by `half_life`.

    After each commit `changed` is called with the rows of acceptance_state that changed, as they are then.
    """

    database: Database
    _: KW_ONLY
    half_life: timedelta = HALF_LIFE
    changed: Callable[[Sequence[StateRow]], None] | None = None
    _days: KnownDays = field(default_factory=KnownDays, init=False)

    def record(self, outcomes: Sequence[Outcome], *, owner: str) -> list[OutboxMessage]:
        """Record what this owner still holds; returns the messages to publish, in order.

        An outcome whose claim was lost (another attempt, another owner, or another outcome already recorded) is
        dropped: it overwrites, counts and publishes nothing. A call may be repeated, because its commit may have been
        carried out although the connection broke: an outcome that this very claim has recorded is returned for
        publishing, and counted no second time.

        Raises SourcesGone where a text that is to be reused is recorded no more.
        """
        if not outcomes:
            return []
        try:
            with self.database.begin() as connection:
                messages, rows = self._record(connection, outcomes, owner)
        except StoreError:
            self._days.forget()
            raise
        if rows and self.changed is not None:
            self.changed(rows)
        return messages

    def _record(
        self, connection: Connection, outcomes: Sequence[Outcome], owner: str
    ) -> tuple[list[OutboxMessage], Sequence[StateRow]]:
        rows: Sequence[StateRow] = ()
        check_sources(connection, [(outcome.job_id, outcome.reused) for outcome in outcomes if outcome.reused])
        winners = _end_jobs(connection, outcomes, owner)
        if winners:
            rows = record_counts(connection, [won.counted for won in winners], self.half_life, days=self._days)
            record_texts(
                connection, [(w.job_id, w.run.decoded_at, w.probe_text) for w in winners if w.run and w.probe_text]
            )
            remember(connection, [(won.job_id, won.remembered) for won in winners if won.remembered])
            record_reuse(
                connection,
                [(won.job_id, won.reuse_key, won.run.decoded_at) for won in winners if won.run and won.reuse_key],
                [(won.job_id, won.reused) for won in winners if won.reused],
            )
        if len(winners) < len(outcomes):
            winners += _recorded_before(connection, outcomes, {won.job_id for won in winners})
        return _enqueue(connection, winners, owner) if winners else [], rows


def record_counts(
    connection: Connection,
    jobs: Sequence[JobCounts],
    half_life: timedelta,
    *,
    recorded_at: datetime | None = None,
    days: KnownDays | None = None,
) -> list[StateRow]:
    """Record these jobs together, in the caller's transaction; `recorded_at` is now unless given.

    Returns the rows of acceptance_state that changed, as they are now. A missing partition is made first; those of
    `days` are not looked for. All rows are locked before a ledger_id is drawn, so jobs are added to every sum in the
    order of their ledger_ids.
    """
    jobs = [job for job in jobs if job.run is not None or job.shadows]
    if not jobs:
        return []
    decoded = {job.run.decoded_at for job in jobs if job.run} | {s.decoded_at for job in jobs for s in job.shadows}
    (days or KnownDays()).ensure(connection, {utc_day(at) for at in decoded})
    evidence = [row for job in jobs for row in _ledger_rows(job)]
    with _one_exchange(connection) as driver:
        add_to_hours(driver, jobs)
        locked = lock_keys(driver, evidence)
    drawn, clock = locked.ledger_ids()
    changed = add_jobs(driver, locked, evidence, drawn, half_life)
    rows = _Rows(min(drawn), recorded_at or clock)
    ledger_ids = iter(drawn)
    for job in jobs:
        rows.add(job, ledger_ids)
    if rows.runs:
        _copy_lines(connection, decode_runs, _RUN_COLUMNS, rows.runs)
    if rows.evidence:
        _copy_lines(connection, evidence_rows, _EVIDENCE_COLUMNS, rows.evidence)
    return changed


def _end_jobs(connection: Connection, outcomes: Sequence[Outcome], owner: str) -> list[Outcome]:
    """Write status and outcome of jobs whose claim is held; returns those outcomes, each job once, in order."""
    winners: set[int] = set()
    waiting = list(enumerate(outcomes))
    while waiting:
        # A statement may write a row once, so another outcome of the same job, if there is one, needs another.
        group: dict[str, tuple[int, Outcome]] = {}
        for numbered in waiting:
            group.setdefault(numbered[1].job_id, numbered)
        waiting = [numbered for numbered in waiting if group[numbered[1].job_id] is not numbered]
        asked = [outcome for _, outcome in group.values()]
        columns: dict[str, Any] = {
            name: [getattr(outcome, name) for outcome in asked] for name in ("job_id", "attempt", "status")
        }
        columns["result"] = [outcome.result.decode() for outcome in asked]
        columns["headers"] = [json.dumps(dict(outcome.headers)) if outcome.headers else None for outcome in asked]
        with _one_exchange(connection) as driver:  # with the BEGIN
            answer = driver.execute(_END_JOBS, {**columns, "owner": owner})
        rows = answer.fetchall()
        winners.update(group[job_id][0] for job_id, is_unknown in rows if not is_unknown)
        if unknown := [job_id for job_id, is_unknown in rows if is_unknown]:
            driver.execute("DELETE FROM jobs WHERE job_id = ANY(%(unknown)s)", {"unknown": unknown})
    return [outcome for number, outcome in enumerate(outcomes) if number in winners]


def _recorded_before(connection: Connection, outcomes: Sequence[Outcome], recorded_now: Set[str]) -> list[Outcome]:
    """Those outcomes that an earlier call recorded whose answer was lost.

    Their rows of the outbox are taken out, because the caller enters the messages anew. If a relay publishes one of
    them at this moment, its messages go out twice, byte for byte the same.
    """
    asked = {outcome.job_id: outcome for outcome in outcomes if outcome.job_id not in recorded_now}
    columns: dict[str, Any] = {
        name: [getattr(outcome, name) for outcome in asked.values()] for name in ("job_id", "attempt")
    }
    columns["result"] = [outcome.result.decode() for outcome in asked.values()]
    driver = driver_of(connection)
    recorded_before = [job_id for (job_id,) in driver.execute(_RECORDED_BEFORE, columns)]
    if recorded_before:
        driver.execute(_TAKE_OUT, {"job_ids": recorded_before})
    return [asked[job_id] for job_id in recorded_before]


def _enqueue(connection: Connection, winners: Sequence[Outcome], owner: str) -> list[OutboxMessage]:
    by_topic: dict[str, list[str]] = {}
    for won in winners:
        by_topic.setdefault(won.topic, []).append(won.job_id)
    ids = {topic: enqueue(connection, topic, job_ids, owner) for topic, job_ids in by_topic.items()}
    return [
        OutboxMessage(ids[won.topic], won.topic, won.job_id.encode(), won.result, dict(won.headers)) for won in winners
    ]


#: An attempt belongs to one claim, so its number and the same bytes mean that the same worker recorded it.
_RECORDED_BEFORE: Final = """
    SELECT job_id
    FROM unnest(%(job_id)b::text[], %(attempt)b::int[], %(result)b::text[])
        WITH ORDINALITY AS given(job_id, attempt, result, number)
        JOIN jobs USING (job_id, attempt)
    WHERE jobs.outcome::text = given.result
    ORDER BY number
"""
_TAKE_OUT: Final = """
    DELETE FROM outbox WHERE id IN (
        SELECT id FROM outbox WHERE job_ids <@ %(job_ids)b::text[] FOR UPDATE SKIP LOCKED
    )
"""
#: An INSERT, although the rows are there: its arbiter is the primary key, whatever the planner knows about the table,
#: and it locks rows in the order of job_id, as all statements of `JobStore` do. An UPDATE with a join does neither: it
#: was planned while the table was empty, and then read the whole table for every group of outcomes. What is inserted
#: for a row that was not there is deleted again by the caller. A later request to cancel finds a job that ended.
_END_JOBS: Final = """
    WITH ended AS (
        INSERT INTO jobs AS claimed (job_id, attempt, status, outcome, headers, owner, payload_sha256, task, purpose)
        SELECT given.job_id, given.attempt, given.status, CAST(given.result AS json),
            CAST(given.headers AS json), %(owner)s, '', '', ''
        FROM unnest(%(job_id)b::text[], %(attempt)b::int[], %(status)b::text[], %(result)b::text[],
            %(headers)b::text[]) AS given(job_id, attempt, status, result, headers)
        ORDER BY given.job_id COLLATE "C"
        ON CONFLICT (job_id) DO UPDATE SET status = excluded.status, outcome = excluded.outcome,
            headers = excluded.headers, owner = NULL, lease_expires_at = NULL, finished_at = now()
        WHERE claimed.status = 'running' AND claimed.attempt = excluded.attempt AND claimed.owner = excluded.owner
        RETURNING job_id, owner IS NOT NULL AS is_unknown
    ), too_late AS (
        DELETE FROM cancellations WHERE job_id = ANY(ARRAY(SELECT job_id FROM ended WHERE NOT is_unknown))
    )
    SELECT job_id, is_unknown FROM ended
"""
_COUNTED: Final = (
    *("ledger_id", "recorded_in", "recorded_at", "job_id", "decoded_at"),
    *EvidenceKey.__slots__,
    *AcceptanceCounts.__slots__,
    "chances",
)
_RUN_COLUMNS: Final = (
    *_COUNTED,
    *("attempt", "is_evidence", "decode_batch_id"),
    *("purpose", "mode", "reason", "device", "proposers"),
    *("num_draft_tokens", "num_prompt_tokens", "num_tokens", "is_cut", "batch_size", "num_texts"),
    *("queue_s", "time_to_first_token_s", "wall_s", "device_s"),
    *("target", "batch_id"),
)
_EVIDENCE_COLUMNS: Final = (
    *_COUNTED,
    *("source", "is_whole", "num_draft_tokens", "num_prompt_tokens", "num_output_tokens", "is_cut"),
)
_key_values: Final[Callable[[EvidenceKey], tuple[str, ...]]] = attrgetter(*EvidenceKey.__slots__)


def _ledger_rows(job: JobCounts) -> list[tuple[EvidenceKey, EvidenceSums] | None]:
    """The job's rows in order: its run, None unless that is evidence, then its shadows."""
    rows: list[tuple[EvidenceKey, EvidenceSums] | None] = [*job.evidence]
    if len(rows) < len(job.shadows) + (job.run is not None):
        rows.insert(0, None)
    return rows


class _Rows:
    """The rows of both tables of one transaction as lines for COPY, by `_RUN_COLUMNS` and `_EVIDENCE_COLUMNS`."""

    def __init__(self, recorded_in: int, recorded_at: datetime) -> None:
        self.runs: list[str] = []
        self.evidence: list[str] = []
        self._recorded = f"{recorded_in}\t{recorded_at}"
        # What many rows have in common is written once.
        self._text_of = cache(str)
        self._key_of = cache(lambda key: _fields_of(_key_values(key)))
        self._how_of = cache(lambda *values: _fields_of(values))

    def add(self, job: JobCounts, ledger_ids: Iterator[int]) -> None:
        """The rows of a job, each with the next ledger_id."""
        if (run := job.run) is not None:
            first_s = _NULL if run.time_to_first_token_s is None else run.time_to_first_token_s
            self.runs.append(
                f"{self._counted(next(ledger_ids), job.job_id, run)}"
                f"\t{job.attempt}\t{job.is_run_evidence}\t{self._text_of(run.decode_batch_id)}"
                f"\t{self._how_of(run.purpose, run.mode, run.reason, run.device)}\t{_proposers_field(run)}"
                f"\t{run.num_draft_tokens}\t{run.num_prompt_tokens}\t{run.num_tokens}\t{run.is_cut}\t{run.batch_size}"
                f"\t{run.num_texts}"
                f"\t{run.queue_s}\t{first_s}\t{run.wall_s}\t{run.device_s}"
                f"\t{self._how_of(run.target)}\t{_NULL if run.batch_id is None else self._how_of(run.batch_id)}\n"
            )
        for shadow in job.shadows:
            is_cut = _NULL if shadow.is_cut is None else shadow.is_cut
            self.evidence.append(
                f"{self._counted(next(ledger_ids), job.job_id, shadow)}"
                f"\t{job.source(shadow).value}\t{shadow.is_whole}"
                f"\t{shadow.num_draft_tokens}\t{shadow.num_prompt_tokens}\t{shadow.num_output_tokens}\t{is_cut}\n"
            )

    def _counted(self, ledger_id: int, job_id: str, counted: DecodeRun | ShadowRun) -> str:
        counts = counted.counts
        return (
            f"{ledger_id}\t{self._recorded}\t{_fields_of((job_id,))}\t{self._text_of(counted.decoded_at)}"
            f"\t{self._key_of(counted.key)}\t{counts.rounds}\t{counts.num_empty_rounds}\t{counts.num_cropped}"
            f"\t{_array_field(counts.proposed)}\t{_array_field(counts.trials)}\t{_array_field(counts.accepts)}"
            f"\t{counts.num_forced}\t{_array_field(counted.chances)}"
        )


def _proposers_field(run: DecodeRun) -> str:
    """By proposer, its trials and accepts, as JSON; null of most jobs."""
    if not run.proposers:
        return _NULL
    by_proposer = {counts.proposer: {"trials": counts.trials, "accepts": counts.accepts} for counts in run.proposers}
    return _fields_of((json.dumps(by_proposer),))


@contextmanager
def _one_exchange(connection: Connection) -> Iterator[psycopg.Connection]:
    """Statements of the block are sent together; their answers can be read after the block.

    Each sees what those before it did. COPY is not possible here. An answer that is waited for costs a change of
    threads twice.
    """
    driver = driver_of(connection)
    with driver.pipeline():
        yield driver


_NULL: Final = r"\N"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


def _copy_lines(connection: Connection, table: Table, columns: Sequence[str], lines: Iterable[str]) -> None:
    """Insert rows with the values of `columns` by COPY, in the caller's transaction. Each line ends with a newline.

    Postgres reads them in a third of the time of an INSERT. The lines are made by the caller, not by the driver: what
    rows have in common is then written once for all of them, which halves the time again.

    Raises psycopg.Error, which `Database.begin` converts.
    """
    statement = f"COPY {table.name} ({', '.join(columns)}) FROM STDIN"
    with driver_of(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.write("".join(lines))


def _fields_of(values: Iterable[str]) -> str:
    """Texts as neighbouring fields of a line."""
    return "\t".join([value.translate(_ESCAPES) for value in values])


def _array_field(numbers: Sequence[int]) -> str:
    """An array of numbers as a field."""
    return f"{{{','.join(map(str, numbers))}}}" if numbers else "{}"


class OutboxMessage(NamedTuple):
    """A result to be published; `id` is its row, which messages of one transaction share.

    `headers` are those that the job's message hands on to it.
    """

    id: int
    topic: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, str]

    @property
    def job_id(self) -> str:
        """The job whose result this is."""
        return (self.key or b"").decode()


def enqueue(connection: Connection, topic: str, job_ids: Sequence[str], owner: str) -> int:
    """Add the outcomes of jobs to what must be published, in the caller's transaction.

    Returns the id of the row.
    """
    row = {"topic": topic, "job_ids": list(job_ids), "owner": owner}
    (row_id,) = driver_of(connection).execute(_ENQUEUE, row).fetchone() or (0,)
    return int(row_id)


class Outbox(Store):
    """The table of messages to be published. At least once: a crash after publishing publishes again."""

    def delete(self, ids: Collection[int]) -> None:
        """Delete rows whose messages the broker has all acknowledged. What was set aside has rows of its own."""
        if not ids:
            return
        with self._database.single() as connection:
            driver_of(connection).execute("DELETE FROM outbox WHERE id = ANY(%s)", [list(ids)])

    def take_over(self, *, older_than_s: float, limit: int) -> dict[int, list[OutboxMessage]]:
        """The messages of up to `limit` rows that no worker has published for `older_than_s`, oldest first, by row.

        For the next `older_than_s` they are the caller's, who publishes them and deletes the rows. A row may be left
        without messages, because retention has deleted its jobs.
        """
        with self._database.begin() as connection:
            asked = {"older_than_s": older_than_s, "limit": limit}
            rows = sorted(driver_of(connection).execute(_TAKE_OVER, asked).fetchall())
            values = _outcomes(connection, [job_id for _, _, job_ids in rows for job_id in job_ids])
        return {
            row_id: [
                OutboxMessage(row_id, topic, job_id.encode(), *values[job_id]) for job_id in job_ids if job_id in values
            ]
            for row_id, topic, job_ids in rows
        }

    def num_set_aside(self) -> int:
        """Messages that Kafka refused for good, and that wait for a person."""
        num_messages = func.coalesce(func.sum(func.cardinality(outbox.c.job_ids)), 0)
        return int(self._database.scalar(select(num_messages).where(outbox.c.set_aside_at.is_not(None))))


class RefusedResultStore(Store):
    """Keeps what is recorded and what is published the same where Kafka refuses a result.

    A row of the outbox is locked first, so of two workers that publish it only one decides. Where the row is gone, or
    no longer names a job, the other worker has decided.
    """

    def replace(self, row_id: int, results: Mapping[str, bytes]) -> set[str]:
        """Record failures in the place of results that were never published; returns the jobs it was done for.

        `results` are Result messages of status failed, by job. From now on they are the outcomes of these jobs, also
        for a delivery that comes again; what was refused stays in `jobs.refused_outcome`.
        """
        return self._rewrite(row_id, results, _REPLACE, lambda named: {"status": Status.FAILED.value})

    def refer(self, row_id: int, results: Mapping[str, bytes], urls: Mapping[str, str]) -> set[str]:
        """Record results that refer to their texts (job_id → Result, job_id → where its text lies).

        They were never published with their texts, and are the outcomes of these jobs from now on. The scheduler
        deletes the texts after the jobs. Returns the jobs for which it was done.
        """
        return self._rewrite(row_id, results, _REFER, lambda named: {"urls": [urls[job_id] for job_id in named]})

    def _rewrite(
        self, row_id: int, results: Mapping[str, bytes], statement: str, given: Callable[[list[str]], dict[str, Any]]
    ) -> set[str]:
        with self._database.begin() as connection:
            named = [job_id for job_id in _locked(connection, row_id) if job_id in results]
            if not named:
                return set()
            asked = {"job_ids": named, "results": [results[job_id].decode() for job_id in named], **given(named)}
            return {job_id for (job_id,) in driver_of(connection).execute(statement, asked).fetchall()}

    def postpone(self, row_id: int, job_ids: Collection[str]) -> set[str]:
        """Take jobs out of a row and put them into rows of their own, which a worker publishes later.

        Returns the jobs that the row still named.
        """
        return self._move(row_id, dict.fromkeys(job_ids), _POSTPONE)

    def set_aside(self, row_id: int, because: Mapping[str, str]) -> set[str]:
        """Take jobs out of a row and put them into rows that no worker publishes, with the reason (job_id → reason).

        Returns the jobs that the row still named.
        """
        return self._move(row_id, because, _SET_ASIDE)

    def _move(self, row_id: int, because: Mapping[str, str | None], statement: str) -> set[str]:
        with self._database.begin() as connection:
            before, driver = _locked(connection, row_id), driver_of(connection)
            named = [job_id for job_id in before if job_id in because]
            for job_id in named:
                driver.execute(statement, {"id": row_id, "job_id": job_id, "because": because[job_id]})
            if named:
                driver.execute(_KEEP, {"id": row_id, "job_ids": [job_id for job_id in before if job_id not in because]})
            return set(named)


_ENQUEUE: Final = """
    INSERT INTO outbox (topic, job_ids, owner)
    VALUES (%(topic)s, %(job_ids)b::text[], %(owner)s) RETURNING id
"""
_TAKE_OVER: Final = """
    WITH due AS (
        SELECT id FROM outbox
        WHERE set_aside_at IS NULL
            AND coalesce(relayed_at, created_at) <= now() - make_interval(secs => %(older_than_s)s)
        ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    )
    UPDATE outbox SET relayed_at = now() FROM due WHERE outbox.id = due.id
    RETURNING outbox.id, topic, job_ids
"""


def _outcomes(connection: Connection, job_ids: Sequence[str]) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Result and headers of each job."""
    query = select(jobs.c.job_id, cast(jobs.c.outcome, Text), jobs.c.headers).where(jobs.c.job_id == any_of(job_ids))
    return {job_id: (outcome.encode(), headers or {}) for job_id, outcome, headers in connection.execute(query)}


_LOCK_ROW: Final = "SELECT job_ids FROM outbox WHERE id = %s FOR UPDATE"
#: Locks the rows of jobs in the order of job_id, as all statements that lock several of them do.
_REPLACE: Final = """
    WITH given AS (
        SELECT job_id, result FROM unnest(%(job_ids)b::text[], %(results)b::text[]) AS given(job_id, result)
    ), locked AS MATERIALIZED (
        SELECT job_id FROM jobs WHERE job_id IN (SELECT job_id FROM given) AND status <> 'running'
            AND refused_outcome IS NULL
        ORDER BY job_id COLLATE "C" FOR UPDATE
    )
    UPDATE jobs SET refused_outcome = jobs.outcome, outcome = CAST(given.result AS json), status = %(status)s
    FROM given JOIN locked USING (job_id) WHERE jobs.job_id = given.job_id
    RETURNING jobs.job_id
"""
_REFER: Final = """
    WITH given AS (
        SELECT job_id, result, url
        FROM unnest(%(job_ids)b::text[], %(results)b::text[], %(urls)b::text[]) AS given(job_id, result, url)
    ), locked AS MATERIALIZED (
        SELECT job_id FROM jobs WHERE job_id IN (SELECT job_id FROM given) AND status <> 'running'
        ORDER BY job_id COLLATE "C" FOR UPDATE
    ), kept AS (
        INSERT INTO stored_texts (url, job_id) SELECT url, job_id FROM given JOIN locked USING (job_id)
        ON CONFLICT DO NOTHING
    )
    UPDATE jobs SET outcome = CAST(given.result AS json)
    FROM given JOIN locked USING (job_id) WHERE jobs.job_id = given.job_id
    RETURNING jobs.job_id
"""
_POSTPONE: Final = """
    INSERT INTO outbox (topic, job_ids, owner, created_at, relayed_at)
    SELECT topic, ARRAY[%(job_id)s], owner, created_at, now() FROM outbox WHERE id = %(id)s
"""
_SET_ASIDE: Final = """
    INSERT INTO outbox (topic, job_ids, owner, created_at, set_aside_at, set_aside_because)
    SELECT topic, ARRAY[%(job_id)s], owner, created_at, now(), %(because)s FROM outbox WHERE id = %(id)s
"""
_KEEP: Final = """
    WITH emptied AS (DELETE FROM outbox WHERE id = %(id)s AND cardinality(%(job_ids)b::text[]) = 0)
    UPDATE outbox SET job_ids = %(job_ids)b::text[] WHERE id = %(id)s AND cardinality(%(job_ids)b::text[]) > 0
"""


def _locked(connection: Connection, row_id: int) -> list[str]:
    """The jobs of a row, which is locked until the end of the transaction; none if the row is gone."""
    row = driver_of(connection).execute(_LOCK_ROW, [row_id]).fetchone()
    return list(row[0]) if row else []
