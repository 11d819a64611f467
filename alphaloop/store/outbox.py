"""The outbox: messages that were recorded with their outcomes and that the broker has not acknowledged yet.

The worker that records outcomes publishes them from memory and deletes the row. Rows that grow old were left by workers
that died between the two: another worker takes them over. One row stands for all outcomes of a transaction and topic.
Results that the broker refuses are replaced in the record before anybody has seen them, or set aside here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import ARRAY, Connection, Text, bindparam, cast, func, select

from alphaloop.messages import Status
from alphaloop.store.database import Store, driver_of
from alphaloop.tables import jobs, outbox


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
        """The messages of up to `limit` rows that nobody has published for `older_than_s`, oldest first, by row.

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
        return self._rewrite(row_id, results, _REFER, lambda named: {"urls": [urls[one] for one in named]})

    def _rewrite(
        self, row_id: int, results: Mapping[str, bytes], statement: str, given: Callable[[list[str]], dict[str, Any]]
    ) -> set[str]:
        with self._database.begin() as connection:
            named = [job_id for job_id in _locked(connection, row_id) if job_id in results]
            if not named:
                return set()
            asked = {"job_ids": named, "results": [results[one].decode() for one in named], **given(named)}
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
                driver.execute(_KEEP, {"id": row_id, "job_ids": [one for one in before if one not in because]})
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
    query = select(jobs.c.job_id, cast(jobs.c.outcome, Text), jobs.c.headers).where(
        jobs.c.job_id == func.any(bindparam("job_ids", list(job_ids), ARRAY(Text)))
    )
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
    found = driver_of(connection).execute(_LOCK_ROW, [row_id]).fetchone()
    return list(found[0]) if found else []
