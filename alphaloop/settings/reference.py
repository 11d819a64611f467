"""The reference page of the settings, generated from the models, so that no setting is missing."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV, Settings, sections_of

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
    parts.append("\n## General\n" + _table({name: (field, comments.get(name, "")) for name, field in free}, ENV_PREFIX))
    for name, field in Settings.model_fields.items():
        for section in sections_of(field.annotation):
            one = f".<{name.removesuffix('s')}>" if _is_mapping(field.annotation) else ""
            parts += _sections(name + one, section)
    return "".join(parts)


def _sections(path: str, model: type[BaseModel]) -> list[str]:
    comments = _comments(model)
    own: dict[str, tuple[FieldInfo, str]] = {}
    nested = []
    for name, field in model.model_fields.items():
        sections = sections_of(field.annotation)
        if not sections:
            own[name] = (field, comments.get(name, ""))
        for section in sections:
            nested.append((f"{path}.{name}" + (".<name>" if _is_mapping(field.annotation) else ""), section))
    doc = inspect.cleandoc(model.__doc__ or "")
    parts = [f"\n## `[{path}]`{_tag(model)}\n\n{doc}\n"]
    if own:
        prefix = ENV_PREFIX + path.upper().replace(".", "__") + "__"
        parts.append(_table(own, prefix))
    for nested_path, section in nested:
        parts += _sections(nested_path, section)
    return parts


def _tag(model: type[BaseModel]) -> str:
    """The setting that selects this section, where there are several for one name."""
    for name in ("method", "kind"):
        if name in model.model_fields and not (field := model.model_fields[name]).is_required():
            return f", `{name} = {json.dumps(field.default)}`"
    return ""


def _table(fields: dict[str, tuple[FieldInfo, str]], prefix: str) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {comment} |\n" for name, (field, comment) in fields.items()
    ]
    return f"\nVariables: `{prefix}…`\n\n| setting | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"


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
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if issubclass(one, BaseModel) and "__annotations__" in vars(one) and one is not BaseModel:
            found |= _own_comments(one)
    return found


def _own_comments(model: type[BaseModel]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(model))
    lines = source.splitlines()
    found = {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 - the source of a class is a class
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if match := re.search(r"#: ?(.+)$", text, re.MULTILINE):
                found[node.target.id] = match[1].strip().replace("|", r"\|")
    return found
