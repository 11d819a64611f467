"""Headers of messages: traces and events that results carry on, and where a job on a retry topic came from.

What comes from outside is checked and bounded before it is copied, because a sender's headers must not make a result
too large for its topic. A value that breaks a rule is left out; the job is decoded all the same.

A job that waits on a retry topic is its message, byte for byte, with headers of ours that name the place it was sent
to. So it keeps its id through all tries, also a derived one, and counts its waiting time from when it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from alphaloop.errors import MalformedMessage
from alphaloop.messages.topics import task_of

#: W3C asks that at least so much of `tracestate` is passed on. We pass on no more.
MAX_TRACESTATE_CHARS: Final = 512
MAX_TRACESTATE_MEMBERS: Final = 32

_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{1,256}")


def trace_context(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """The valid `traceparent` and `tracestate` of a message, of each the last one.

    Without a valid `traceparent` there is no trace. Only the first members of a long `tracestate` are kept, because the
    newest one stands first.
    """
    given = {name: value or b"" for name, value in headers if name in ("traceparent", "tracestate")}
    parent = given.get("traceparent", b"")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    context = {"traceparent": parent.decode("ascii")}
    if state := _bounded(given.get("tracestate", b"")):
        context["tracestate"] = state
    return context


def _bounded(state: bytes) -> str:
    # What is read is bounded too: a header may be as long as a message.
    kept: list[str] = []
    num_chars = -1
    for part in state[: 4 * MAX_TRACESTATE_CHARS].decode("ascii", "replace").split(","):
        member = part.strip(" \t")
        if not member:
            continue
        num_chars += 1 + len(member)
        is_whole = num_chars <= MAX_TRACESTATE_CHARS and len(kept) < MAX_TRACESTATE_MEMBERS
        if not is_whole or not _MEMBER.fullmatch(member):
            break
        kept.append(member)
    return ",".join(kept)


CAUSATION_ID: Final = "ce_causationid"
RESULT_EVENT: Final = "alphaloop.result"
CHUNK_EVENT: Final = "alphaloop.chunk"
EVENT_SOURCE: Final = "/alphaloop"
MAX_EVENT_ID_CHARS: Final = 200

_EVENT_ID: Final = re.compile(rf"[^\x00-\x1f\x7f]{{1,{MAX_EVENT_ID_CHARS}}}")
_ENVELOPE: Final = "application/cloudevents"


def carried_headers(headers: Sequence[tuple[str, bytes]]) -> dict[str, str]:
    """What the headers of a job's message hand on to its result and chunks; empty for a message without headers.

    `traceparent` and `tracestate` unchanged, and `ce_id` as `ce_causationid`.
    """
    if not headers:
        return {}
    carried = trace_context(headers)
    event_ids = [value or b"" for name, value in headers if name == "ce_id"]
    if event_ids and _EVENT_ID.fullmatch(event_id := event_ids[-1].decode("utf-8", "replace")):
        carried[CAUSATION_ID] = event_id
    return carried


def refuse_envelope(headers: Sequence[tuple[str, bytes]]) -> None:
    """Raise MalformedMessage for a CloudEvent in structured mode, whose value is an envelope around the job."""
    for name, value in headers:
        if name.lower() == "content-type" and (value or b"").lower().startswith(_ENVELOPE.encode()):
            raise MalformedMessage(
                f"expected the job itself as the value, found the content type {_ENVELOPE}",
                hint="send CloudEvents in binary mode: attributes in ce_ headers, the job as the value",
            )


def event_headers(kind: str, event_id: str, job_id: str, carried: Mapping[str, str]) -> dict[str, str]:
    """The headers of a message that we send: a CloudEvent in binary mode, in the trace of its job."""
    return {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_type": kind,
        "ce_source": EVENT_SOURCE,
        "ce_id": event_id,
        "ce_subject": job_id,
        **carried,
    }


def result_headers(job_id: str, carried: Mapping[str, str]) -> dict[str, str]:
    """The headers of a result. A job has one, so its event has the job's id."""
    return event_headers(RESULT_EVENT, job_id, job_id, carried)


def encoded(headers: Mapping[str, str]) -> tuple[tuple[str, bytes], ...]:
    """Headers as Kafka takes them."""
    return tuple((name, value.encode()) for name, value in headers.items())


#: Those that all results have alike.
_OF_ALL_RESULTS: Final = tuple(
    (name, value) for name, value in encoded(result_headers("", {})) if name not in ("ce_id", "ce_subject")
)


def encoded_result_headers(
    job_id: bytes, carried: Mapping[str, str], *, event_id: bytes | None = None
) -> tuple[tuple[str, bytes], ...]:
    """`encoded(result_headers(…))`, in another order and in a third of the time.

    `event_id`: of a refused record, because another record may be answered under the same job_id.
    """
    return (*_OF_ALL_RESULTS, ("ce_id", event_id or job_id), ("ce_subject", job_id), *encoded(carried))


RETRY_PREFIX: Final = "alphaloop-retry-"

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
        said = ((name, getattr(self, field)) for field, name in _RETRY.items())
        return (*sent_headers(sent), *((name, str(value).encode()) for name, value in said if value is not None))

    @classmethod
    def read(cls, headers: Headers) -> Self | None:
        """What headers say; None if they are not those of a waiting job, which was sent to a topic of jobs."""
        said = {name: value for name, value in headers if name.startswith(RETRY_PREFIX)}
        said.setdefault(_RETRY["timestamp_ms"], b"")
        try:
            return cls(**{field: _READ.get(field, _number)(said[name]) for field, name in _RETRY.items()})
        except (KeyError, ValueError):
            return None


#: Header of each field: `alphaloop-retry-not-before` of `not_before_ms`.
_RETRY: Final = {
    field.name: RETRY_PREFIX + field.name.removesuffix("_ms").replace("_", "-") for field in fields(RetryHeaders)
}


def sent_headers(headers: Iterable[tuple[str, bytes]]) -> Headers:
    """The headers without ours, as the message was sent."""
    return tuple((name, value) for name, value in headers if not name.startswith(RETRY_PREFIX))


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise ValueError
    return int(digits)


def _timestamp_ms(digits: bytes) -> int:
    # A sender may give its message any time that 64 bits hold.
    if not _INT64.fullmatch(digits):
        raise ValueError
    return int(digits)


_INT64: Final = re.compile(rb"-?[0-9]{1,19}")


def _topic(name: bytes) -> str:
    if len(name) > _MAX_TOPIC_CHARS or task_of(topic := name.decode()) is None:
        raise ValueError
    return topic


_MAX_TOPIC_CHARS: Final = 249  #: Kafka's own limit

#: How fields are read that are no number in digits.
_READ: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "topic": _topic,
    "reason": bytes.decode,
    "timestamp_ms": lambda digits: _timestamp_ms(digits) if digits else None,
}
