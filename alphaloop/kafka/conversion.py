"""Between the client's types and ours."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from typing import Any, Final

import confluent_kafka as ck

from alphaloop.kafka.records import Record, TopicPartition

log = logging.getLogger(__name__)


def ours(partitions: Iterable[ck.TopicPartition]) -> list[TopicPartition]:
    """The client's partitions as ours, without offsets."""
    return [TopicPartition(tp.topic, tp.partition) for tp in partitions]


def theirs(partitions: Iterable[TopicPartition]) -> list[ck.TopicPartition]:
    """Our partitions as the client takes them."""
    return [ck.TopicPartition(tp.topic, tp.partition) for tp in partitions]


#: A call from C, whose result Python checks. That of `message.headers()` is no longer checked once the interpreter has
#: specialised the call (Python 3.11): the client's error would then be raised by whatever runs next.
_read_headers: Final = operator.methodcaller("headers")


def record_of(message: ck.Message) -> Record:
    """A polled message without an error. Headers that the client cannot give are left out."""
    kind, timestamp_ms = message.timestamp()
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=_headers(message),
        timestamp_ms=None if kind == ck.TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
    )


def _headers(message: ck.Message) -> tuple[tuple[str, bytes], ...]:
    try:
        # The client's stub also allows a mapping; headers that were read are always a list of pairs.
        headers: Any = _read_headers(message)
    except (SystemError, UnicodeDecodeError):
        # The client gives none of the headers if the name of one is not UTF-8. The message itself can be read, and an
        # error here would end every worker that polls it.
        where = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
        log.warning("headers left out: a name is not UTF-8", extra={"action": "headers_unreadable", **where})
        return ()
    return tuple((name, _bytes(value) or b"") for name, value in headers or ())


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
