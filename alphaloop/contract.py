"""The message contract as documents: JSON Schemas, an AsyncAPI 3 description and the settings reference.

They are generated from the pydantic models, so that they cannot disagree with the code:
`python -m alphaloop.contract` writes them into docs/reference/, `--check` compares and changes nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from alphaloop.contract_asyncapi import asyncapi
from alphaloop.contract_headers import (
    DIALECT,
    chunk_headers_schema,
    dead_letter_headers_schema,
    job_headers_schema,
    result_headers_schema,
)
from alphaloop.messages import Job, Result, retry
from alphaloop.messages.body import UNSUPPORTED
from alphaloop.messages.chunk import ChunkBody
from alphaloop.messages.job import SHORTHAND
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
            name: {"type": "string", "description": description} for name, description in retry.DESCRIPTIONS.items()
        },
        "required": [name for name in retry.DESCRIPTIONS if name != retry.TIMESTAMP],
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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
