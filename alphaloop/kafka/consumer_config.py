"""The properties of a consumer for long jobs: nothing is committed but by the caller, and little is fetched ahead."""

from __future__ import annotations

from typing import Any, Final, Literal

from alphaloop.kafka.config import DEAD_LETTER_OVERHEAD_BYTES
from alphaloop.settings import KafkaSettings

#: Where a partition without a committed offset begins.
Start = Literal["earliest", "latest", "error"]

_MAX_HEARTBEAT_MS: Final = 3000


def consumer_config(kafka: KafkaSettings, *, group_id: str, client_id: str, start: Start) -> dict[str, Any]:
    """What a member of a group sets beside the properties of all clients."""
    fetch_bytes = kafka.max_message_bytes + DEAD_LETTER_OVERHEAD_BYTES
    return {
        "group.id": group_id,
        "client.id": client_id,
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": start,
        "isolation.level": "read_committed",
        "session.timeout.ms": kafka.session_timeout_ms,
        "heartbeat.interval.ms": max(1, min(_MAX_HEARTBEAT_MS, kafka.session_timeout_ms // 10)),
        "max.poll.interval.ms": max(300_000, kafka.session_timeout_ms),
        "queued.min.messages": 50,
        "queued.max.messages.kbytes": max(16_384, fetch_bytes >> 10),
        "fetch.queue.backoff.ms": 100,
        "fetch.message.max.bytes": fetch_bytes,
        "fetch.max.bytes": max(16 << 20, fetch_bytes),
        "allow.auto.create.topics": False,
    }
