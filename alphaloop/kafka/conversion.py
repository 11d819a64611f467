"""Between the client's types and ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import confluent_kafka as ck

from alphaloop.kafka.records import Record, TopicPartition


def ours(partitions: Iterable[ck.TopicPartition]) -> list[TopicPartition]:
    """The client's partitions as ours, without offsets."""
    return [TopicPartition(tp.topic, tp.partition) for tp in partitions]


def theirs(partitions: Iterable[TopicPartition]) -> list[ck.TopicPartition]:
    """Our partitions as the client takes them."""
    return [ck.TopicPartition(tp.topic, tp.partition) for tp in partitions]


def record_of(message: ck.Message) -> Record:
    """A polled message without an error."""
    kind, timestamp_ms = message.timestamp()
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=_headers(message.headers()),
        timestamp_ms=None if kind == ck.TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
    )


def _headers(headers: Any) -> tuple[tuple[str, bytes], ...]:
    # The client's stub also allows a mapping; headers that were read are always a list of pairs.
    return tuple((name, _bytes(value) or b"") for name, value in headers or ())


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
