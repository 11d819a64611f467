"""Messages recorded with an outcome and not yet acknowledged by the broker.

The worker that records an outcome publishes it from memory and deletes the row. The relay publishes the messages of
workers that died between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ARRAY, BigInteger, bindparam, delete, func, select

from alphaloop.store.database import Database
from alphaloop.tables import outbox


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A Kafka message to be published; `id` is its row."""

    id: int
    topic: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, str]


class Outbox:
    """The table of messages to be published. At least once: a crash after publishing publishes again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def delete(self, ids: Collection[int]) -> None:
        """Delete messages that the broker has acknowledged."""
        if not ids:
            return
        with self._database.begin() as connection:
            connection.execute(
                delete(outbox).where(outbox.c.id == func.any(bindparam("ids", list(ids), ARRAY(BigInteger))))
            )

    def relay(
        self, publish: Callable[[Sequence[OutboxMessage]], None], *, older_than_s: float, limit: int = 500
    ) -> int:
        """Publish messages that have waited longer than `older_than_s`, oldest first; returns how many.

        `publish` returns once the broker has acknowledged all of them, or raises, and then nothing is deleted. Rows
        that another process is relaying are passed over.
        """
        query = (
            select(outbox.c.id, outbox.c.topic, outbox.c.key, outbox.c.value, outbox.c.headers)
            .where(outbox.c.created_at <= func.now() - timedelta(seconds=older_than_s))
            .order_by(outbox.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._database.begin() as connection:
            messages = [OutboxMessage(*row) for row in connection.execute(query)]
            if messages:
                publish(messages)
                connection.execute(delete(outbox).where(outbox.c.id.in_([message.id for message in messages])))
        return len(messages)

    def num_pending(self) -> int:
        """Messages not yet acknowledged."""
        with self._database.begin() as connection:
            return connection.execute(select(func.count()).select_from(outbox)).scalar_one()
