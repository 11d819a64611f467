"""Records and partitions without the client library's types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Memory that a record takes beside its bytes, and each of its headers: objects of Python, rounded up.
_RECORD_OVERHEAD_BYTES: Final = 1024
_HEADER_OVERHEAD_BYTES: Final = 192


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

    @property
    def num_bytes(self) -> int:
        """About what the message takes in memory: key, value and headers, because any of them may be large."""
        headers = sum(len(name) + len(content) + _HEADER_OVERHEAD_BYTES for name, content in self.headers)
        return _RECORD_OVERHEAD_BYTES + len(self.key or b"") + len(self.value or b"") + headers
