"""Records and partitions without the client library's types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Record:
    """One message as the broker stored it. A header sent without a value arrives as empty bytes."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int | None

    @property
    def topic_partition(self) -> TopicPartition:
        """Where the message lies."""
        return TopicPartition(self.topic, self.partition)
