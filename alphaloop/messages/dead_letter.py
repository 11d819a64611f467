"""A dead letter: a message that cannot become a job, or whose job failed, with the reason in its headers.

Key, value and original headers are kept byte for byte, so that they can be sent again. The added headers have Kafka's
names for share groups (KIP-1191); ours start with `alphaloop-`. Those name the result that answers the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from alphaloop.errors import MessageError
from alphaloop.messages.headers import Headers
from alphaloop.messages.result import Failure, Status
from alphaloop.messages.topics import dlq_topic

PREFIX: Final = "__dlq.errors."
JOB_ID: Final = "alphaloop-job-id"  #: header with the job_id of the result that answers the message, if one does
OUTCOME: Final = "alphaloop-outcome"  #: header with the job's recorded status; absent from a message that is no job
MAX_REASON_CHARS: Final = 2000
MAX_FIELD_CHARS: Final = 200  #: a field's path holds names that the sender chose

#: What of a shortened letter's value, key or headers is not what was sent. Such a letter cannot be sent again.
SHORTENED: Final = PREFIX + "shortened"
_KEPT_VALUE_BYTES: Final = 64 << 10
_KEPT_HEADERS_BYTES: Final = 8 << 10
_MAX_KEY_BYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message came from, and the timestamp of its record in milliseconds since 1970, if it has one."""

    cluster: str
    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message for `<topic>.dlq`."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def dead_letter(
    error: MessageError | Failure,
    origin: Origin,
    *,
    group: str,
    num_deliveries: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
    job_id: str | None = None,
) -> DeadLetter:
    """Build the dead letter of a refused message, or of a job that failed.

    `job_id` is that of its result. A message has none that was sent to another topic than those of jobs.

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
    if origin.timestamp_ms is not None:
        reason["timestamp"] = str(origin.timestamp_ms)
    kept = [(name, content) for name, content in headers if not is_reason(name)]
    added = [(PREFIX + name, text.encode("utf-8", "replace")) for name, text in reason.items()]
    if job_id is not None:
        added.append((JOB_ID, job_id.encode()))
        if isinstance(error, Failure):
            added.append((OUTCOME, Status.FAILED.value.encode()))
    return DeadLetter(topic=dlq_topic(origin.topic), key=key, value=value, headers=(*kept, *added))


def is_reason(header: str) -> bool:
    """Whether a header of this name was added to a dead letter, and is no header of its message."""
    return header.startswith(PREFIX) or header in (JOB_ID, OUTCOME)


def shortened(letter: DeadLetter) -> DeadLetter | None:
    """The letter with less of the message, for a broker that refuses it as it is; None if no less is possible.

    First the value is cut to 64 KiB and long headers of the sender are left out; then all of them, the value and a long
    key. The header `__dlq.errors.shortened` says what; the whole message lies at the topic, partition and offset that
    the other headers name.
    """
    is_first = all(name != SHORTENED for name, _ in letter.headers)
    first = _cut(letter, _KEPT_VALUE_BYTES, _KEPT_HEADERS_BYTES) if is_first else None
    return first or _cut(letter, 0, 0)


def _cut(letter: DeadLetter, max_value_bytes: int, max_header_bytes: int) -> DeadLetter | None:
    """The letter within these bounds; None if it was before."""
    ours = [(name, content) for name, content in letter.headers if is_reason(name) and name != SHORTENED]
    theirs = [(name, content) for name, content in letter.headers if not is_reason(name)]
    said = [content.decode() for name, content in letter.headers if name == SHORTENED]
    num_before = len(said)
    key, value = letter.key, letter.value or b""
    if len(value) > max_value_bytes:
        said.append(f"{max_value_bytes} of {len(value)} bytes of the value kept")
        value = value[:max_value_bytes]
    if (num_header_bytes := sum(len(name) + len(content) for name, content in theirs)) > max_header_bytes:
        said.append(f"{num_header_bytes} bytes of headers left out")
        theirs = []
    if key is not None and len(key) > _MAX_KEY_BYTES:
        said.append(f"a key of {len(key)} bytes left out")
        key = None
    if len(said) == num_before:
        return None
    return DeadLetter(letter.topic, key, value, (*theirs, *ours, (SHORTENED, "; ".join(said).encode())))
