"""What an answer has to look like: a constraint on its text, or calls of tools.

OpenAI's `response_format`, vLLM's `structured_outputs`, and its older `guided_…` names say the same in other words.
They stay as they were sent, so that they can be sent on; `Constraint` says once what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic_core import PydanticCustomError, from_json

from alphaloop.messages.fields import (
    as_json,
    encodable,
    nothing_or_other,
    refuse_other_keys,
    shown,
    without_nulls,
    wrong_within,
)

#: UTF-8 bytes of one schema, grammar or expression, or of all choices together.
MAX_CONSTRAINT_BYTES: Final = 1 << 18
#: UTF-8 bytes of all tools of a job, as JSON.
MAX_TOOLS_BYTES: Final = 1 << 18
MAX_TOOLS: Final = 128
MAX_CHOICES: Final = 1024
#: OpenAI's pattern, and the dots that servers of tools have in names.
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORMAT_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

#: vLLM's older names, and where their values stand now in `structured_outputs`.
GUIDED: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
#: Values of structured_outputs that say nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "json_object": (False,),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tools"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text has to match, as the engines get it."""

    kind: ConstraintKind
    #: The schema as JSON, the expression, the choices as a JSON array, the grammar; empty for json_object. For
    #: `tools`, which become a grammar in the target's form of a call, it is {"functions": […], "parallel": …}, as JSON.
    source: str
    field: str  #: where its sender wrote it, from the message's top: `body.response_format.json_schema.schema`


def constraint_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    must_call: Sequence[Mapping[str, Any]],
    *,
    is_parallel: bool,
) -> Constraint | None:
    """The constraint of a body, whose fields were read here; `must_call`: tools of which one has to be called."""
    if response_format is not None:
        if response_format["type"] == "json_object":
            return Constraint("json_object", "", "body.response_format")
        source = _compact(response_format["json_schema"]["schema"])
        return Constraint("json_schema", source, "body.response_format.json_schema.schema")
    if structured_outputs is not None:
        ((name, value),) = structured_outputs.items()
        field = f"body.structured_outputs.{name}"
        match name:
            case "json_object":
                return Constraint("json_object", "", field)
            case "json":
                return Constraint("json_schema", _compact(value), field)
            case "choice":
                return Constraint("choice", _compact(value), field)
            case "regex":
                return Constraint("regex", value, field)
            case _:
                return Constraint("grammar", value, field)
    if must_call:
        functions = [tool["function"] for tool in must_call]
        return Constraint("tools", _compact({"functions": functions, "parallel": is_parallel}), "body.tool_choice")
    return None


def _compact(value: object) -> str:
    return as_json(value, max_bytes=2 * (MAX_CONSTRAINT_BYTES + MAX_TOOLS_BYTES))


def read_response_format(value: object) -> dict[str, Any] | None:
    """OpenAI's response_format; None of any text. `{"type": "json_object", "schema": …}` is a json_schema.

    Raises ValueError, or `wrong_within`.
    """
    if not isinstance(value, dict):
        raise ValueError('expected {"type": "json_schema", "json_schema": {…}}, found another value')
    value = without_nulls(value)
    match value.get("type"):
        case "text":
            refuse_other_keys(value, ("type",))
            return None
        case "json_object":
            refuse_other_keys(value, ("type", "schema"))
            if "schema" not in value:
                return {"type": "json_object"}
            given, field = {"schema": value["schema"]}, "schema"
        case "json_schema":
            refuse_other_keys(value, ("type", "json_schema"))
            inner = value.get("json_schema")
            if not isinstance(inner, dict):
                expected = '{"name": "…", "schema": {…}}'
                raise wrong_within("json_schema", f"expected {expected}, found {nothing_or_other(inner)}")
            given, field = without_nulls(inner), "json_schema.schema"
            refuse_other_keys(given, ("name", "description", "schema", "strict"), within="json_schema.")
            _check_labels(given)
        case other:
            raise wrong_within("type", f"expected text, json_object or json_schema, found {shown(other)}")
    schema = _at(field, _schema, given.get("schema"))
    return {"type": "json_schema", "json_schema": {"name": "answer", **given, "schema": schema}}


def _check_labels(given: Mapping[str, Any]) -> None:
    name, description, strict = (given.get(key) for key in ("name", "description", "strict"))
    if name is not None and not (isinstance(name, str) and _FORMAT_NAME.fullmatch(name)):
        raise wrong_within("json_schema.name", "expected 1 to 64 letters, digits, _ . or -, found another value")
    if description is not None:
        _at("json_schema.description", _text, description)
    if not isinstance(strict, bool | None):
        raise wrong_within("json_schema.strict", "expected true or false, found another value")


def read_structured_outputs(value: object) -> dict[str, Any] | None:
    """vLLM's structured_outputs: one constraint; None where it says nothing. Raises ValueError, or `wrong_within`."""
    if not isinstance(value, dict):
        raise ValueError('expected {"json": {…}}, or regex, choice or grammar, found another value')
    constraints = {
        name: item
        for name, item in value.items()
        if item is not None and not any(item is neutral for neutral in _NEUTRAL.get(name, ()))
    }
    if not constraints:
        return None
    refuse_other_keys(constraints, _READERS)
    if len(constraints) > 1:
        first, second, *_ = constraints
        raise wrong_within(second, f"expected one constraint, found {first} and {second}")
    ((name, item),) = constraints.items()
    return {name: _at(name, _READERS[name], item)}


def read_tools(value: object) -> tuple[dict[str, Any], ...]:
    """OpenAI's tools, functions all of them. Raises ValueError, or `wrong_within`."""
    if not isinstance(value, list | tuple):
        raise ValueError("expected an array of tools, found another value")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"expected at most {MAX_TOOLS} tools, found {len(value)}")
    names: set[str] = set()
    for number, tool in enumerate(value):
        name = _name_of_tool(f"{number}", tool)
        if name in names:
            raise wrong_within(f"{number}.function.name", "expected another name than an earlier tool's")
        names.add(name)
    as_json(list(value), max_bytes=MAX_TOOLS_BYTES)
    return tuple(without_nulls({**tool, "function": without_nulls(tool["function"])}) for tool in value)


def _name_of_tool(field: str, tool: object) -> str:
    if not isinstance(tool, dict):
        raise wrong_within(field, 'expected {"type": "function", "function": {…}}, found another value')
    if tool.get("type") != "function":
        raise wrong_within(f"{field}.type", f"expected 'function', found {shown(tool.get('type'))}")
    function = _function_of(tool, f"{field}.function")
    for key, kinds, expected in (
        ("description", str | None, "a text"),
        ("parameters", dict | None, "a JSON Schema"),
        ("strict", bool | None, "true or false"),
    ):
        if not isinstance(function.get(key), kinds):
            raise wrong_within(f"{field}.function.{key}", f"expected {expected}, found another value")
    kinds = (function.get("parameters") or {}).get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise wrong_within(f"{field}.function.parameters.type", "expected object, because arguments have names")
    return _read_name(f"{field}.function.name", function.get("name"))


def _function_of(value: Mapping[str, Any], field: str) -> dict[str, Any]:
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong_within(field, f'expected {{"name": "…"}}, found {nothing_or_other(function)}')
    return function


def _read_name(field: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        other = nothing_or_other(name)
        raise wrong_within(field, f"expected a name of 1 to 128 letters, digits, _ . or -, found {other}")
    return name


def read_tool_choice(value: object) -> str | dict[str, Any]:
    """OpenAI's tool_choice in its four forms. Raises ValueError, or `wrong_within`."""
    if value in ("none", "auto", "required"):
        return str(value)
    if not isinstance(value, dict):
        raise ValueError("expected none, auto, required, or the function to call, found another value")
    match value.get("type"):
        case "function":
            name = _read_name("function.name", _function_of(value, "function").get("name"))
            return {"type": "function", "function": {"name": name}}
        case "allowed_tools":
            return {"type": "allowed_tools", "allowed_tools": _allowed_tools(value.get("allowed_tools"))}
        case other:
            raise wrong_within("type", f"expected function or allowed_tools, found {shown(other)}")


def _allowed_tools(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        expected = '{"mode": "auto", "tools": […]}'
        raise wrong_within("allowed_tools", f"expected {expected}, found {nothing_or_other(value)}")
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise wrong_within("allowed_tools.mode", f"expected auto or required, found {shown(mode)}")
    if not isinstance(tools, list | tuple) or not 0 < len(tools) <= MAX_TOOLS:
        raise wrong_within("allowed_tools.tools", f"expected an array of 1 to {MAX_TOOLS} tools, found another value")
    names = [_name_of_tool(f"allowed_tools.tools.{number}", tool) for number, tool in enumerate(tools)]
    return {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}


def chosen_tools(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[Sequence[dict[str, Any]], bool]:
    """The tools that may be called, and whether one has to be. Raises `wrong_within` for a choice of unknown tools."""
    if not tools or choice == "none":
        return (), False
    if choice is None or isinstance(choice, str):
        return tools, choice == "required"
    if choice["type"] == "function":
        names, is_forced, field = {choice["function"]["name"]}, True, "function.name"
    else:
        names = {tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]}
        is_forced, field = choice["allowed_tools"]["mode"] == "required", "allowed_tools.tools"
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    if len(chosen) < len(names):
        raise wrong_within(f"tool_choice.{field}", "expected the name of one of the tools, found another")
    return chosen, is_forced


def _at(field: str, read: Callable[[object], Any], value: object) -> Any:
    """What `read` makes of a field's value; its ValueError becomes one about this field."""
    try:
        return read(value)
    except PydanticCustomError as error:  # `wrong_within`, which is a ValueError too
        within = error.context or {}
        raise wrong_within(f"{field}.{within['field']}", within["message"]) from None
    except ValueError as error:
        raise wrong_within(field, str(error)) from None


def _schema(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        if len(value) > MAX_CONSTRAINT_BYTES:
            raise ValueError(f"expected at most {MAX_CONSTRAINT_BYTES} bytes, found {len(value)} characters")
        try:
            value = from_json(encodable(value), allow_inf_nan=False)
        except ValueError:
            raise ValueError("expected a JSON Schema, found a text that is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON Schema, an object, found {nothing_or_other(value)}")
    as_json(value, max_bytes=MAX_CONSTRAINT_BYTES)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text that is not empty, found another value")
    if (num_bytes := len(encodable(value).encode())) > MAX_CONSTRAINT_BYTES:
        raise ValueError(f"expected at most {MAX_CONSTRAINT_BYTES} bytes, found {num_bytes}")
    return value


def _choices(value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_CHOICES:
        raise ValueError(f"expected an array of 1 to {MAX_CHOICES} texts, found another value")
    for number, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise wrong_within(str(number), "expected a text that is not empty, found another value")
    as_json(list(value), max_bytes=MAX_CONSTRAINT_BYTES)
    return list(value)


def _true(value: object) -> bool:
    if value is not True:
        raise ValueError("expected true or false, found another value")
    return True


_READERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "json": _schema,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
    "json_object": _true,
}

RESPONSE_FORMAT_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "oneOf": [
        {"properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "properties": {"type": {"const": "json_object"}, "schema": {"type": ["object", "string", "null"]}},
            "required": ["type"],
            "additionalProperties": {"type": "null"},
        },
        {
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": ["string", "null"], "pattern": f"^{_FORMAT_NAME.pattern}$"},
                        "description": {"type": ["string", "null"], "minLength": 1},
                        "schema": {"type": ["object", "string"]},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ],
    "description": "What the text has to be: any text, a JSON object, or JSON of a schema.",
}
STRUCTURED_OUTPUTS_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "string", "null"]},
        "regex": {"type": ["string", "null"], "minLength": 1},
        "choice": {
            "type": ["array", "null"],
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        },
        "grammar": {"type": ["string", "null"], "minLength": 1},
        "json_object": {"type": ["boolean", "null"]},
    },
    "description": "vLLM's form of a constraint, one of these; guided_json, guided_regex, guided_choice and "
    "guided_grammar are read too.",
}
_OBJECTS: Final = {"anyOf": [{"const": "object"}, {"type": "array", "contains": {"const": "object"}}]}
TOOLS_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"], "properties": {"type": _OBJECTS}},
                    "strict": {"type": ["boolean", "null"]},
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
    "description": "Functions that the model may call.",
}
TOOL_CHOICE_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "pattern": f"^{_NAME.pattern}$"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "minItems": 1}},
                    "required": ["mode", "tools"],
                },
            },
            "required": ["type", "allowed_tools"],
        },
    ],
    "description": "Whether a tool is called: none, auto, required, one function, or one of some.",
}
