"""The code as documents: JSON Schemas of job, result and chunk, and the references of settings and command line.

They are generated, so that they cannot disagree with the code: `python -m alphaloop.contract` writes them into
docs/reference/, `--check` compares and changes nothing. The schemas of headers and the AsyncAPI document beside them
are written by hand, and tests hold real messages against them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from alphaloop.cli.app import cli_reference
from alphaloop.messages import Job, Result
from alphaloop.messages.answer_form import GUIDED, STRUCTURED_OUTPUTS_SCHEMA
from alphaloop.messages.body import SHORTHAND, UNSUPPORTED
from alphaloop.messages.stream import ChunkBody
from alphaloop.settings.reference import settings_reference

_NULL: Final[dict[str, Any]] = {"type": "null"}
REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """JSON Schema of a job as it may be sent: `job_id` and `task` may be left out, and so may `body`.

    The prompt stands in `body`, at the top level, or where `body_ref` says.

    Pydantic's own schema describes the parsed Job, in which all three are there.
    """
    schema = Job.model_json_schema(mode="validation")
    body = schema["$defs"]["Body"]
    body["properties"] |= {
        name: {"enum": list(neutral), "description": "Not supported: only the value that changes nothing."}
        for name, neutral in UNSUPPORTED.items()
    }
    body["properties"]["max_completion_tokens"] = {
        **body["properties"]["max_tokens"],
        "description": "Newer name of max_tokens; give one of the two.",
    }
    properties = body["properties"]
    only = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1}
    properties["prompt"] = _or(properties["prompt"], only)
    forms = STRUCTURED_OUTPUTS_SCHEMA["properties"]
    properties |= {
        name: {**forms[kind], "description": f"Older name of structured_outputs.{kind}."}
        for name, kind in GUIDED.items()
    }
    properties["stop"] = _or(properties["stop"], {"type": "string", "minLength": 1, "maxLength": 256})
    bias = properties["logit_bias"]["anyOf"][0]
    bias["additionalProperties"] = _or(bias["additionalProperties"], _NULL)
    for optional in (properties, schema["properties"]):
        optional.update({name: _or(field, _NULL) for name, field in optional.items() if name not in UNSUPPORTED})
    one_prompt = [_has("messages"), _has("prompt")]
    loose: dict[str, Any] = {name: {"$ref": f"#/$defs/Body/properties/{name}"} for name in sorted(SHORTHAND)}
    prompt = {"type": "string", "minLength": 1, "description": "Shorthand for one user message."}
    loose["prompt"] = _or(_or(prompt, only), _NULL)
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
    """JSON Schema of a chunk's value: OpenAI's chat.completion.chunk."""
    return {"$schema": DIALECT, **ChunkBody.model_json_schema(mode="validation"), "title": "Chunk"}


def documents() -> dict[str, str]:
    """Every generated file: its path below docs/reference/, and its text."""
    data = {
        "schemas/job.json": job_schema(),
        "schemas/result.json": result_schema(),
        "schemas/chunk.json": chunk_schema(),
    }
    texts = {path: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for path, content in data.items()}
    return {**texts, "settings.md": settings_reference(), "cli.md": cli_reference()}


def outdated() -> list[str]:
    """Paths of generated files that are missing or differ from what the code says."""
    files = {REFERENCE / path: text for path, text in documents().items()}
    return [
        str(path.relative_to(REFERENCE))
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str]) -> int:
    """Write the documents, or with `--check` name those that are out of date; the exit status."""
    stale = outdated()
    if arguments == ["--check"]:
        if stale:
            sys.stderr.write(f"out of date in docs/reference/: {', '.join(stale)}\nhint: make generated\n")
        return 1 if stale else 0
    for path, text in documents().items():
        (REFERENCE / path).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / path).write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {', '.join(stale) or 'nothing: all up to date'}\n")
    return 0


def _has(name: str) -> dict[str, Any]:
    # null counts as left out, as OpenAI's clients send it.
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _or(field: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may also be another one."""
    told: dict[str, Any] = {key: field[key] for key in ("default", "description", "title") if key in field}
    rest = {key: part for key, part in field.items() if key not in told}
    if other == _NULL and _NULL["type"] in rest.get("type", ()):
        return field
    kinds = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {"anyOf": [*kinds, other], **told} if other not in kinds else field


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
