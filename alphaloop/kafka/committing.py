"""Commits with a time limit, because the client's synchronous commit has none."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import confluent_kafka as ck

from alphaloop.errors import BrokerUnavailable


class Commits:
    """The commits of one client, one at a time; the caller checks `is_waiting` before the next."""

    def __init__(self, client: ck.Consumer) -> None:
        self._client = client
        self._thread: threading.Thread | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a commit that took too long is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def here(self, offsets: list[ck.TopicPartition]) -> list[ck.TopicPartition]:
        """Commit in this thread: for the client's callbacks. Returns the broker's answers.

        A commit from another thread would get no answer before the callback returns. In a callback the client knows
        whether the coordinator is there, so the commit does not block. Raises KafkaException.
        """
        return self._client.commit(offsets=offsets, asynchronous=False) or []

    def within(self, offsets: list[ck.TopicPartition], timeout_s: float) -> list[ck.TopicPartition]:
        """Commit in a separate thread, because without a coordinator the client blocks for a session timeout.

        Returns the broker's answers. Raises KafkaException, and BrokerUnavailable after `timeout_s`; the commit may
        still arrive.
        """
        outcome: SimpleQueue[list[ck.TopicPartition] | Exception] = SimpleQueue()

        def commit() -> None:
            try:
                outcome.put(self.here(offsets))
            except Exception as error:
                outcome.put(error)

        self._thread = threading.Thread(target=commit, name="kafka-commit", daemon=True)
        self._thread.start()
        try:
            found = outcome.get(timeout=timeout_s)
        except Empty:
            raise BrokerUnavailable(f"committing offsets: no answer within {timeout_s:g} s") from None
        self._thread.join()
        if isinstance(found, Exception):
            raise found
        return found

    def settled(self, timeout_s: float) -> bool:
        """Whether no commit is under way, after a wait of at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_waiting
