"""A job that waits on a retry topic: its message, byte for byte, and in headers of ours where it came from.

The origin goes with the message, so that a job keeps its id through all tries, also a derived one, and counts its
waiting time from when it was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

PREFIX: Final = "alphaloop-retry-"

_TOPIC: Final = PREFIX + "topic"
_PARTITION: Final = PREFIX + "partition"
_OFFSET: Final = PREFIX + "offset"
TIMESTAMP: Final = PREFIX + "timestamp"
_NOT_BEFORE: Final = PREFIX + "not-before"
_NUM_FAILURES: Final = PREFIX + "num-failures"
_REASON: Final = PREFIX + "reason"

DESCRIPTIONS: Final = {
    _TOPIC: "Topic to which the job was sent.",
    _PARTITION: "Its partition, in digits.",
    _OFFSET: "Its offset, in digits.",
    TIMESTAMP: "Its timestamp, in milliseconds since 1970; absent if it had none.",
    _NOT_BEFORE: "When the job is tried again, in milliseconds since 1970.",
    _NUM_FAILURES: "How often the job has failed, in digits.",
    _REASON: "Code of the last failure, docs/reference/errors.md.",
}

Headers = Sequence[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class RetryHeaders:
    """What the headers of a waiting job say."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    not_before_ms: int
    num_failures: int
    reason: str

    def headers(self, sent: Headers) -> Headers:
        """The headers of the message as it was sent, with these."""
        said: dict[str, str | int | None] = {
            _TOPIC: self.topic,
            _PARTITION: self.partition,
            _OFFSET: self.offset,
            TIMESTAMP: self.timestamp_ms,
            _NOT_BEFORE: self.not_before_ms,
            _NUM_FAILURES: self.num_failures,
            _REASON: self.reason,
        }
        return (
            *sent_headers(sent),
            *((name, str(value).encode()) for name, value in said.items() if value is not None),
        )

    @classmethod
    def read(cls, headers: Headers) -> Self | None:
        """What headers say; None if they are not those of a waiting job."""
        said = {name: value for name, value in headers if name.startswith(PREFIX)}
        try:
            return cls(
                topic=said[_TOPIC].decode(),
                partition=_number(said[_PARTITION]),
                offset=_number(said[_OFFSET]),
                timestamp_ms=_number(said[TIMESTAMP]) if TIMESTAMP in said else None,
                not_before_ms=_number(said[_NOT_BEFORE]),
                num_failures=_number(said[_NUM_FAILURES]),
                reason=said[_REASON].decode(),
            )
        except (KeyError, ValueError):
            return None


def sent_headers(headers: Iterable[tuple[str, bytes]]) -> Headers:
    """The headers without ours, as the message was sent."""
    return tuple((name, value) for name, value in headers if not name.startswith(PREFIX))


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise ValueError
    return int(digits)
