"""Headers of our messages on Kafka: what a job's message hands on, and the CloudEvents attributes of what we send.

Results and chunks go on in the trace of their job and name the event that caused them. What is copied is checked and
bounded, because the sender's headers must not make a result too large for its topic. A value that breaks a rule is left
out; the job is decoded all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from alphaloop.errors import MalformedMessage
from alphaloop.messages.trace_context import trace_context

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


def encoded_result_headers(job_id: bytes, carried: Mapping[str, str]) -> tuple[tuple[str, bytes], ...]:
    """`encoded(result_headers(…))`, in another order and in a third of the time."""
    return (*_OF_ALL_RESULTS, ("ce_id", job_id), ("ce_subject", job_id), *encoded(carried))
