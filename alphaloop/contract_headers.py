"""JSON Schemas of the headers on Kafka; alphaloop.contract writes them into docs/reference/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from alphaloop.messages import Status
from alphaloop.messages.dead_letter import JOB_ID, OUTCOME, PREFIX
from alphaloop.messages.headers import CAUSATION_ID, CHUNK_EVENT, EVENT_SOURCE, RESULT_EVENT

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_DEAD_LETTER_HEADERS: Final = {
    "topic": "Topic the message was read from.",
    "partition": "Its partition, in digits.",
    "offset": "Its offset, in digits.",
    "group": "Consumer group that refused it.",
    "delivery.count": "How often it was tried, in digits.",
    "message": "What was found and what was expected; never prompt text.",
    "exception": "Code of the error, docs/reference/errors.md.",
    "shortened": "What of value, key or headers is not the whole; absent when nothing was cut.",
    "field": "Path of the wrong field; absent when the message as a whole is at fault.",
}
_FAILED_JOB_HEADERS: Final = {
    JOB_ID: "The job's id, also where it was derived; only of a job that failed.",
    OUTCOME: "The job's recorded status, failed; absent if the message could not become a job.",
}

_TRACE_HEADERS: Final = {
    "traceparent": "W3C Trace Context.",
    "tracestate": "W3C Trace Context; at most 512 characters and 32 entries are handed on.",
}
_EVENT_HEADERS: Final[dict[str, Any]] = {
    "content-type": {"const": "application/json"},
    "ce_specversion": {"const": "1.0"},
    "ce_type": {"type": "string"},
    "ce_source": {"const": EVENT_SOURCE},
    "ce_id": {"type": "string", "description": "Of a result the job_id, of a chunk job_id/attempt/seq."},
    "ce_subject": {"type": "string", "description": "The job_id."},
}
_PLACE_HEADERS: Final = {
    "job_id": {"type": "string", "description": "The job's."},
    "attempt": {"type": "string", "pattern": "^[1-9][0-9]*$", "description": "Higher for every new decode of the job."},
    "seq": {
        "type": "string",
        "pattern": "^[0-9]+$",
        "description": "Number within the attempt: 0, 1, 2, without gaps.",
    },
    "final": {"enum": ["0", "1"], "description": "1 in the last chunk of the job."},
    "status": {"enum": list(Status), "description": "How the job ended; in the final chunk only."},
}


def job_headers_schema() -> dict[str, Any]:
    """JSON Schema of the headers that a job's message may have; all others are allowed and not read."""
    read = {"ce_id": f"Handed on to result and chunks as {CAUSATION_ID}.", **_TRACE_HEADERS}
    return _headers_schema("JobHeaders", "Headers of a job that are read; none is needed.", _texts(read), [])


def result_headers_schema() -> dict[str, Any]:
    """JSON Schema of a result's headers, each UTF-8 text."""
    return _headers_schema("ResultHeaders", "A CloudEvent in binary mode.", _event(RESULT_EVENT), list(_EVENT_HEADERS))


def chunk_headers_schema() -> dict[str, Any]:
    """JSON Schema of a chunk's headers, each UTF-8 text."""
    place = [name for name in _PLACE_HEADERS if name != "status"]
    return _headers_schema(
        "ChunkHeaders",
        "A CloudEvent in binary mode, with the chunk's place in its stream.",
        _event(CHUNK_EVENT) | _PLACE_HEADERS,
        [*_EVENT_HEADERS, *place],
    )


def dead_letter_headers_schema() -> dict[str, Any]:
    """JSON Schema of a dead letter's own headers, each UTF-8 text; key, value and other headers are the message's."""
    return {
        "$schema": DIALECT,
        "title": "DeadLetterHeaders",
        "description": "Headers added to the message of a dead letter; its key, value and other headers are kept, "
        "unless the letter had to be shortened.",
        "type": "object",
        "properties": _texts(
            {**{PREFIX + name: text for name, text in _DEAD_LETTER_HEADERS.items()}, **_FAILED_JOB_HEADERS}
        ),
        "required": [PREFIX + name for name in _DEAD_LETTER_HEADERS if name not in ("field", "shortened")],
    }


def _headers_schema(title: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "$schema": DIALECT,
        "title": title,
        "description": description,
        "type": "object",
        "properties": properties,
        "required": required,
    }


def _texts(descriptions: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"type": "string", "description": description} for name, description in descriptions.items()}


def _event(kind: str) -> dict[str, Any]:
    handed_on = _texts({CAUSATION_ID: "The ce_id of the job's message, if it had one.", **_TRACE_HEADERS})
    return {
        **_EVENT_HEADERS,
        "ce_type": {"const": kind},
        **handed_on,
    }
