"""The message contract as documents: JSON Schemas, an AsyncAPI 3 description and the settings reference.

They are generated from the pydantic models, so that they cannot disagree with the code:
`python -m alphaloop.contract` writes them into docs/reference/, `--check` compares and changes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from alphaloop import __version__
from alphaloop.messages import Job, Result, Status, headers
from alphaloop.messages.dead_letter import JOB_ID, OUTCOME, PREFIX
from alphaloop.messages.headers import CAUSATION_ID, CHUNK_EVENT, EVENT_SOURCE, RESULT_EVENT
from alphaloop.messages.job import SHORTHAND, UNSUPPORTED
from alphaloop.messages.result import ChunkBody
from alphaloop.settings.reference import settings_reference

_NULL: Final[dict[str, Any]] = {"type": "null"}
_TEXT_PARTS: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
    "description": "Parts of the text, which are put together with nothing between them.",
}
REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"

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


def job_schema() -> dict[str, Any]:
    """JSON Schema of a job as it may be sent: `job_id` and `task` may be left out, and so may `body`.

    The prompt stands in `body`, at the top level, or where `body_ref` says.

    Pydantic's own schema describes the parsed Job, in which all three are there.
    """
    schema = Job.model_json_schema(mode="validation")
    body = schema["$defs"]["Body"]
    _refuse_unsupported(body)
    body["properties"]["max_completion_tokens"] = {
        **body["properties"]["max_tokens"],
        "description": "Newer name of max_tokens; give one of the two.",
    }
    properties = body["properties"]
    properties["stop"] = _or(properties["stop"], {"type": "string", "minLength": 1, "maxLength": 256})
    bias = properties["logit_bias"]["anyOf"][0]
    bias["additionalProperties"] = _or(bias["additionalProperties"], _NULL)
    message = schema["$defs"]["ChatMessage"]["properties"]
    message["content"] = _or(message["content"], _TEXT_PARTS)
    for optional in (properties, schema["properties"]):
        optional.update({name: _or(field, _NULL) for name, field in optional.items() if name not in UNSUPPORTED})
    one_prompt = [_has("messages"), _has("prompt")]
    loose: dict[str, Any] = {name: _reference("#/$defs/Body/properties/" + name) for name in sorted(SHORTHAND)}
    prompt = {"type": "string", "minLength": 1, "description": "Shorthand for one user message."}
    loose["prompt"] = _or(prompt, _NULL)
    loosely = [_has(name) for name in sorted(SHORTHAND)]
    inside = {
        "required": ["body"],
        "properties": {"body": {"type": "object", "oneOf": one_prompt}},
        "not": {"anyOf": [*loosely, _has("body_ref")]},
    }
    shorthand = {"not": {"anyOf": [_has("body"), _has("body_ref")]}, "oneOf": one_prompt}
    by_reference = {
        **_has("body_ref"),
        "not": {
            "anyOf": [
                *one_prompt,
                {"required": ["body"], "properties": {"body": {"type": "object", "anyOf": one_prompt}}},
            ]
            + [{"allOf": [_has("body"), _has(name)]} for name in sorted(SHORTHAND)]
        },
    }
    return {
        "$schema": DIALECT,
        **schema,
        "properties": {**schema["properties"], **loose},
        "required": [],
        "oneOf": [inside, shorthand, by_reference],
    }


def result_schema() -> dict[str, Any]:
    """JSON Schema of a result as it is sent: fields without a value are left out."""
    return {"$schema": DIALECT, **Result.model_json_schema(mode="serialization")}


def chunk_schema() -> dict[str, Any]:
    """JSON Schema of a chunk's value: OpenAI's chat.completion.chunk with one choice."""
    return {"$schema": DIALECT, **ChunkBody.model_json_schema(mode="validation"), "title": "Chunk"}


def retry_headers_schema() -> dict[str, Any]:
    """JSON Schema of the headers added to a job that waits to be tried again, each UTF-8 text."""
    return {
        "$schema": DIALECT,
        "title": "RetryHeaders",
        "description": "Headers added to the message of a job that failed; key, value and other headers are its own.",
        "type": "object",
        "properties": {
            name: {"type": "string", "description": description}
            for name, description in headers.RETRY_DESCRIPTIONS.items()
        },
        "required": [name for name in headers.RETRY_DESCRIPTIONS if name != headers.RETRY_TIMESTAMP],
    }


def documents() -> dict[str, str]:
    """Every generated file: its path below docs/reference/, and its text."""
    data = {
        "schemas/job.json": job_schema(),
        "schemas/result.json": result_schema(),
        "schemas/job_headers.json": job_headers_schema(),
        "schemas/result_headers.json": result_headers_schema(),
        "schemas/chunk.json": chunk_schema(),
        "schemas/chunk_headers.json": chunk_headers_schema(),
        "schemas/dead_letter_headers.json": dead_letter_headers_schema(),
        "schemas/retry_headers.json": retry_headers_schema(),
        "asyncapi.json": asyncapi(),
    }
    texts = {path: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for path, content in data.items()}
    return {**texts, "settings.md": settings_reference()}


def outdated(folder: Path = REFERENCE) -> list[str]:
    """Paths of generated files below `folder` that are missing or differ from what the code says."""
    return [
        path
        for path, text in documents().items()
        if not (folder / path).is_file() or (folder / path).read_text(encoding="utf-8") != text
    ]


def write(folder: Path = REFERENCE) -> None:
    """Write every generated file below `folder`."""
    for path, text in documents().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the documents, or with `--check` name those that are out of date; the exit status."""
    stale = outdated()
    if arguments == ["--check"]:
        if stale:
            sys.stderr.write(f"out of date in docs/reference/: {', '.join(stale)}\nhint: make generated\n")
        return 1 if stale else 0
    write()
    sys.stdout.write(f"wrote {', '.join(stale) or 'nothing: all up to date'}\n")
    return 0


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, neutral in UNSUPPORTED.items():
        body["properties"][name] = {
            "enum": list(neutral),
            "description": "Not supported: only the value that changes nothing.",
        }


def _has(name: str) -> dict[str, Any]:
    # null counts as left out, as OpenAI's clients send it.
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _or(field: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may also be another one."""
    told: dict[str, Any] = {key: field[key] for key in ("default", "description", "title") if key in field}
    rest = {key: part for key, part in field.items() if key not in told}
    kinds = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {"anyOf": [*kinds, other], **told} if other not in kinds else field


def _reference(path: str) -> dict[str, str]:
    return {"$ref": path}


def asyncapi() -> dict[str, Any]:
    """An AsyncAPI 3 document of the topics from alphaloop's side: it receives jobs and sends results."""
    task = {"task": {"description": "Kind of prompt: a table of configs/tasks.toml."}}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "alphaloop",
            "version": __version__,
            "description": "Jobs in, results out. At-least-once execution, exactly-once recorded outcome.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {
            "jobs": _channel("jobs.{task}", "job", "Jobs of one task.", task),
            "highJobs": _channel("jobs.{task}.high", "job", "Jobs of one task that go before its others.", task),
            "retries": _channel(
                "jobs.{task}.retry.{delay}",
                "retry",
                "Jobs that failed and are tried again after a delay.",
                task | {"delay": {"description": "kafka.retry_delays_s in its largest unit: 10s, 1m, 10m."}},
            ),
            "deadLetters": _channel(
                "jobs.{task}.dlq", "deadLetter", "Messages that cannot become a job, and jobs that failed.", task
            ),
            "results": _channel("results", "result", "One result for every job, keyed by job_id."),
            "tokens": _channel("tokens", "tokenChunk", "Text while it is decoded, of jobs with stream=true."),
            "control": _channel("control", "cancellation", "Requests to cancel a job that has not ended."),
            "driftReports": _channel("drift-reports", "driftReport", "What the scheduler found, one a run."),
        },
        "operations": {
            "receiveJob": _operation("receive", "jobs", "job"),
            "receiveHighJob": _operation("receive", "highJobs", "job"),
            "sendRetry": _operation("send", "retries", "retry"),
            "receiveRetry": _operation("receive", "retries", "retry"),
            "sendDeadLetter": _operation("send", "deadLetters", "deadLetter"),
            "sendResult": _operation("send", "results", "result"),
            "sendTokens": _operation("send", "tokens", "tokenChunk"),
            "receiveCancellation": _operation("receive", "control", "cancellation"),
            "sendDriftReport": _operation("send", "driftReports", "driftReport"),
        },
        "components": {
            "messages": {
                "job": _message("A text to generate", "schemas/job.json", "schemas/job_headers.json"),
                "result": _message("What became of a job", "schemas/result.json", "schemas/result_headers.json"),
                "tokenChunk": _message(
                    "OpenAI's chat.completion.chunk; headers attempt, seq and final order the chunks of a job",
                    "schemas/chunk.json",
                    "schemas/chunk_headers.json",
                ),
                "cancellation": {
                    "title": "A request to cancel a job",
                    "contentType": "application/json",
                    "payload": {
                        "type": "object",
                        "required": ["action", "job_id"],
                        "properties": {"action": {"const": "cancel"}, "job_id": {"type": "string"}},
                    },
                },
                "driftReport": {"title": "A drift report as data", "contentType": "application/json"},
                "retry": {
                    "title": "The message of a job that failed, byte for byte",
                    "contentType": "application/json",
                    "headers": _schema("schemas/retry_headers.json"),
                },
                "deadLetter": {
                    "title": "A refused message, or the message of a job that failed",
                    "contentType": "application/octet-stream",
                    "headers": _schema("schemas/dead_letter_headers.json"),
                },
            }
        },
    }


def _schema(path: str) -> dict[str, Any]:
    return {"schemaFormat": "application/schema+json;version=draft-2020-12", "schema": {"$ref": path}}


def _message(title: str, path: str, headers_path: str) -> dict[str, Any]:
    return {
        "title": title,
        "contentType": "application/json",
        "headers": _schema(headers_path),
        "payload": _schema(path),
    }


def _channel(
    address: str, message: str, description: str, parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": address,
        "description": description,
        "messages": {message: _reference(f"#/components/messages/{message}")},
    }
    return channel | ({"parameters": dict(parameters)} if parameters else {})


def _operation(action: str, channel: str, message: str) -> dict[str, Any]:
    return {
        "action": action,
        "channel": _reference(f"#/channels/{channel}"),
        "messages": [_reference(f"#/channels/{channel}/messages/{message}")],
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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
