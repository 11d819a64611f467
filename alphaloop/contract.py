"""The code as documents: JSON Schemas of job, result and chunk, and the references of settings and command line.

They are generated, so that they cannot disagree with the code: `python -m alphaloop.contract` writes them into
docs/reference/, `--check` compares and changes nothing. The schemas of headers and the AsyncAPI document beside them
are written by hand, and tests hold real messages against them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from alphaloop.cli.app import cli_reference
from alphaloop.messages import Job, Result
from alphaloop.messages.answer_form import GUIDED, STRUCTURED_OUTPUTS_SCHEMA
from alphaloop.messages.body import SHORTHAND, UNSUPPORTED
from alphaloop.messages.stream import ChunkBody
from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV, Settings, sections_of

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_NULL: Final[dict[str, Any]] = {"type": "null"}
_HEAD: Final = """\
# Settings

Written by `make generated` from `alphaloop/settings/`; `make check` fails when it is out of date.

Read in this order, later ones win: the defaults below, `configs/*.toml`, one profile file (`--profile local`),
options of the command line, the environment. A variable is `ALPHALOOP_`, the section, two underscores, the setting:
`ALPHALOOP_WORKER__BATCH_SIZE=8`; lists and tables are JSON. An unknown key is refused, with the nearest one that
exists.
"""


def settings_reference() -> str:
    """All settings in Markdown: one table a section, with type, default and meaning."""
    plain = "".join(f"| `{name}` | `{'.'.join(path)}` |\n" for name, path in PLAIN_ENV.items())
    parts = [_HEAD, f"\nNames that other tools use are read too:\n\n| variable | setting |\n|---|---|\n{plain}"]
    free = [(name, field) for name, field in Settings.model_fields.items() if not sections_of(field.annotation)]
    comments = _comments(Settings)
    parts.append(
        "\n## General\n" + _table({name: (field, comments.get(name, "")) for name, field in free}, f"{ENV_PREFIX}…")
    )
    for name, field in Settings.model_fields.items():
        for section in sections_of(field.annotation):
            chosen = f".<{name.removesuffix('s')}>" if _is_mapping(field.annotation) else ""
            parts += _sections(name + chosen, section)
    return "".join(parts)


def _sections(path: str, model: type[BaseModel], *, is_list: bool = False) -> list[str]:
    comments = _comments(model)
    own: dict[str, tuple[FieldInfo, str]] = {}
    nested = []
    for name, field in model.model_fields.items():
        sections = sections_of(field.annotation)
        if not sections:
            own[name] = (field, comments.get(name, ""))
        for section in sections:
            nested_path = f"{path}.{name}" + (".<name>" if _is_mapping(field.annotation) else "")
            nested.append((nested_path, section, typing.get_origin(field.annotation) is tuple))
    doc = inspect.cleandoc(model.__doc__ or "")
    heading = f"[[{path}]]" if is_list else f"[{path}]"
    parts = [f"\n## `{heading}`{_tag(model)}\n\n{doc}\n"]
    if own:
        variable = ENV_PREFIX + path.upper().replace(".", "__")
        parts.append(_table(own, f"{variable}=[…]" if is_list else f"{variable}__…"))
    for nested_path, section, is_list_of in nested:
        parts += _sections(nested_path, section, is_list=is_list_of)
    return parts


def _tag(model: type[BaseModel]) -> str:
    """The setting that selects this section, where there are several for one name."""
    for name in ("method", "kind"):
        if name in model.model_fields and not (field := model.model_fields[name]).is_required():
            return f", `{name} = {json.dumps(field.default)}`"
    return ""


def _table(fields: dict[str, tuple[FieldInfo, str]], variables: str) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {comment} |\n" for name, (field, comment) in fields.items()
    ]
    return f"\nVariables: `{variables}`\n\n| setting | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"


def _is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict


def _type(field: FieldInfo) -> str:
    bounds = []
    for rule in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if hasattr(rule, attribute):
                bounds.append(f"{sign} {getattr(rule, attribute)}")
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments if part is not types.NoneType)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "table" if arguments[1] is Any else f"table of {_type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", SecretStr: "secret"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "the user's data folder" if field.annotation is Path else "empty"
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    if isinstance(value, Enum):
        value = value.value
    return f"`{json.dumps(value, ensure_ascii=False, default=str)}`"


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The `#:` comments of a model's fields, by field; those that it has of another section are said there."""
    comments: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and "__annotations__" in vars(base) and base is not BaseModel:
            comments |= _own_comments(base)
    return comments


def _own_comments(model: type[BaseModel]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(model))
    lines = source.splitlines()
    comments = {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 - the source of a class is a class
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if match := re.search(r"#: ?(.+)$", text, re.MULTILINE):
                comments[node.target.id] = match[1].strip().replace("|", r"\|")
    return comments


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
    described: dict[str, Any] = {key: field[key] for key in ("default", "description", "title") if key in field}
    rest = {key: part for key, part in field.items() if key not in described}
    if other == _NULL and _NULL["type"] in rest.get("type", ()):
        return field
    kinds = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {"anyOf": [*kinds, other], **described} if other not in kinds else field


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
