"""A dead letter: a message that cannot become a job, with the reason in its headers.

Key, value and original headers are kept byte for byte, so that they can be sent again. The added headers have Kafka's
names for share groups (KIP-1191); ours start with `alphaloop-`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.errors import MessageError

PREFIX: Final = "__dlq.errors."
MAX_REASON_CHARS: Final = 2000
MAX_FIELD_CHARS: Final = 200  #: a field's path holds names that the sender chose

Headers = Sequence[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message came from."""

    cluster: str
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message for `<topic>.dlq`."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def dead_letter(
    error: MessageError,
    origin: Origin,
    *,
    group: str,
    num_deliveries: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
) -> DeadLetter:
    """Build the dead letter of a refused message.

    Headers of an earlier refusal are replaced, so a letter sent back and refused again carries its latest reason.
    """
    reason = {
        "topic": origin.topic,
        "partition": str(origin.partition),
        "offset": str(origin.offset),
        "group": group,
        "delivery.count": str(num_deliveries),
        "message": str(error)[:MAX_REASON_CHARS],
        "exception": error.code,
    }
    if error.field:
        reason["field"] = error.field[:MAX_FIELD_CHARS]
    kept = [(name, content) for name, content in headers if not name.startswith(PREFIX)]
    added = [(PREFIX + name, text.encode("utf-8", "replace")) for name, text in reason.items()]
    return DeadLetter(topic=f"{origin.topic}.dlq", key=key, value=value, headers=(*kept, *added))
