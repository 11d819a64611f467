"""Messages recorded with an outcome and not yet acknowledged by the broker.

The worker that records outcomes publishes them from memory and deletes the row. Rows that grow old were left by workers
that died between the two: another worker takes them over. One row stands for all outcomes of a transaction, because
they are published together; their bytes are in `jobs`. alphaloop.store.refused_results sets aside what Kafka refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from sqlalchemy import ARRAY, Connection, Text, bindparam, cast, func, select

from alphaloop.store.database import Database
from alphaloop.store.exchange import driver_of
from alphaloop.tables import jobs, outbox

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


class Outbox:
    """The table of messages to be published. At least once: a crash after publishing publishes again."""

    def __init__(self, database: Database) -> None:
        self._database = database

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

    def num_pending(self) -> int:
        """Messages not yet acknowledged, those set aside included."""
        return self._count()

    def num_set_aside(self) -> int:
        """Messages that Kafka refused for good, and that wait for a person."""
        return self._count(set_aside=True)

    def _count(self, *, set_aside: bool = False) -> int:
        query = select(func.coalesce(func.sum(func.cardinality(outbox.c.job_ids)), 0))
        if set_aside:
            query = query.where(outbox.c.set_aside_at.is_not(None))
        with self._database.begin() as connection:
            return int(connection.execute(query).scalar_one())


def _outcomes(connection: Connection, job_ids: Sequence[str]) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Result and headers of each job."""
    query = select(jobs.c.job_id, cast(jobs.c.outcome, Text), jobs.c.headers).where(
        jobs.c.job_id == func.any(bindparam("job_ids", list(job_ids), ARRAY(Text)))
    )
    return {job_id: (outcome.encode(), headers or {}) for job_id, outcome, headers in connection.execute(query)}
