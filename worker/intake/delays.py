"""When the messages of retry topics are due, and the messages that they stand for.

A retry topic is first in, first out, and all its messages wait equally long, but for a little jitter. So the head of a
partition is due first: the partition is paused until then, and no other waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final

from alphaloop.kafka.records import Record
from alphaloop.messages.retry import RetryHeaders, sent_headers
from alphaloop.messages.topics import retry_delay_s

#: A retry waits up to so much longer than its topic's delay, by lot, so that jobs that failed together do not come
#: back together. Within a partition a message waits at most so much for the one before.
JITTER: Final = 0.2


def as_sent(record: Record) -> Record:
    """The message that failed, at its origin, if this is a retry of it; else the record itself."""
    said = RetryHeaders.read(record.headers) if retry_delay_s(record.topic) is not None else None
    if said is None:
        return record
    return replace(
        record,
        topic=said.topic,
        partition=said.partition,
        offset=said.offset,
        timestamp_ms=said.timestamp_ms,
        headers=tuple(sent_headers(record.headers)),
    )


def due_in_s(record: Record, now: datetime) -> float:
    """Seconds until a message may be delivered, 0 for all but retries.

    No more than the topic's delay and its jitter, whatever the clock of the worker was that sent it.
    """
    delay_s = retry_delay_s(record.topic)
    said = RetryHeaders.read(record.headers) if delay_s is not None else None
    if delay_s is None or said is None:
        return 0.0
    return min(max(0.0, said.not_before_ms / 1000 - now.timestamp()), delay_s * (1 + JITTER))
