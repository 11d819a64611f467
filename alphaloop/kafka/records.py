"""Records and partitions without the client library's types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Memory that a record takes beside its bytes, and each of its headers: objects of Python, rounded up.
_RECORD_OVERHEAD_BYTES: Final = 1024
_HEADER_OVERHEAD_BYTES: Final = 192


class TopicPartition(NamedTuple):
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
    #: About what the message takes in memory: key, value and headers, because any of them may be large.
    num_bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        num_bytes = _RECORD_OVERHEAD_BYTES + len(self.key or b"") + len(self.value or b"")
        if self.headers:
            num_bytes += sum(len(name) + len(content) + _HEADER_OVERHEAD_BYTES for name, content in self.headers)
        object.__setattr__(self, "num_bytes", num_bytes)

    @property
    def topic_partition(self) -> TopicPartition:
        """Where the message lies."""
        return TopicPartition(self.topic, self.partition)
