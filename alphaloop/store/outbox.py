"""Messages recorded with an outcome and not yet acknowledged by the broker.

The worker that records outcomes publishes them from memory and deletes the row. The relay publishes the messages of
workers that died between the two. One row stands for all outcomes of a transaction, because they are published and
acknowledged together; their bytes are in `jobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import ARRAY, Connection, Text, bindparam, cast, delete, func, select

from alphaloop.store.database import Database
from alphaloop.store.exchange import driver_of
from alphaloop.tables import jobs, outbox

_ENQUEUE: Final = """
    INSERT INTO outbox (topic, job_ids, owner)
    VALUES (%(topic)s, %(job_ids)b::text[], %(owner)s) RETURNING id
"""
#: Longer than a publisher waits for the broker.
_RELAY_IDLE: Final = "120s"


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A result to be published; `id` is its row, which messages of one transaction share.

    `headers` are those that the job's message hands on to it.
    """

    id: int
    topic: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, str]


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
        """Delete rows whose messages the broker has all acknowledged."""
        if not ids:
            return
        with self._database.single() as connection:
            driver_of(connection).execute("DELETE FROM outbox WHERE id = ANY(%s)", [list(ids)])

    def relay(self, publish: Callable[[Sequence[OutboxMessage]], None], *, older_than_s: float, limit: int = 4) -> int:
        """Publish the messages of rows older than `older_than_s`, of `limit` rows, oldest first; returns how many.

        `publish` returns once the broker has acknowledged all of them, or raises, and then nothing is deleted. Rows
        that another process is relaying are passed over.
        """
        query = (
            select(outbox.c.id, outbox.c.topic, outbox.c.job_ids)
            .where(outbox.c.created_at <= func.now() - timedelta(seconds=older_than_s))
            .order_by(outbox.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._database.begin() as connection:
            # The transaction is idle while the broker is waited for, and blocks nobody: others pass its rows over.
            connection.execute(select(func.set_config("idle_in_transaction_session_timeout", _RELAY_IDLE, True)))
            rows = connection.execute(query).all()
            values = _outcomes(connection, [job_id for row in rows for job_id in row.job_ids])
            messages = [
                OutboxMessage(row.id, row.topic, job_id.encode(), *values[job_id])
                for row in rows
                for job_id in row.job_ids
                if job_id in values  # else retention has deleted the job
            ]
            if rows:
                publish(messages)
                connection.execute(delete(outbox).where(outbox.c.id.in_([row.id for row in rows])))
        return len(messages)

    def num_pending(self) -> int:
        """Messages not yet acknowledged."""
        query = select(func.coalesce(func.sum(func.cardinality(outbox.c.job_ids)), 0))
        with self._database.begin() as connection:
            return int(connection.execute(query).scalar_one())


def _outcomes(connection: Connection, job_ids: Sequence[str]) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Result and headers of each job."""
    query = select(jobs.c.job_id, cast(jobs.c.outcome, Text), jobs.c.headers).where(
        jobs.c.job_id == func.any(bindparam("job_ids", list(job_ids), ARRAY(Text)))
    )
    return {job_id: (outcome.encode(), headers or {}) for job_id, outcome, headers in connection.execute(query)}
