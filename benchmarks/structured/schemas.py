"""Schemas for real prompts: what a caller of the task would ask for."""

from __future__ import annotations

import json
from typing import Any, Final

#: BFCL writes Python's and Java's names of types.
_TYPES: Final = {
    "dict": "object",
    "HashMap": "object",
    "tuple": "array",
    "list": "array",
    "Array": "array",
    "ArrayList": "array",
    "float": "number",
    "double": "number",
    "int": "integer",
    "long": "integer",
    "String": "string",
    "char": "string",
    "Boolean": "boolean",
}
_PLAIN: Final = frozenset({"object", "array", "number", "integer", "string", "boolean"})

_TEXT: Final = {"type": "string", "maxLength": 80}
REVIEWS: Final = {
    "type": "object",
    "properties": {
        "reviews": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "number": {"type": "integer", "minimum": 1, "maximum": 20},
                    "rating": {"type": "integer", "minimum": 1, "maximum": 5},
                    "quote": _TEXT,
                    "sentiment": {"enum": ["positive", "neutral", "negative"]},
                },
                "required": ["number", "rating", "quote", "sentiment"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 4,
        }
    },
    "required": ["reviews"],
    "additionalProperties": False,
}
PARTIES: Final = {
    "type": "object",
    "properties": {
        "parties": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": _TEXT,
                    "kind": {"enum": ["company", "individual", "authority", "unknown"]},
                    "role": {"enum": ["plaintiff", "defendant", "other"]},
                    "quote": _TEXT,
                },
                "required": ["name", "kind", "role", "quote"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 4,
        },
        "is_complete": {"type": "boolean"},
    },
    "required": ["parties", "is_complete"],
    "additionalProperties": False,
}
FACTS: Final = {
    "type": "object",
    "properties": {
        "subject": _TEXT,
        "facts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": _TEXT, "value": _TEXT, "confidence": {"enum": ["high", "medium", "low"]}},
                "required": ["field", "value", "confidence"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 5,
        },
    },
    "required": ["subject", "facts"],
    "additionalProperties": False,
}


def schema_for(task: str, prompt: str) -> dict[str, Any] | None:
    """The schema of an answer to `prompt`; None for a function-calling prompt without functions that can be read."""
    if task == "function_calling":
        return _calls(prompt)
    words = prompt[:400].lower()
    if "defendant" in words or "plaintiff" in words:
        return PARTIES
    return REVIEWS if "review" in words else FACTS


def _calls(prompt: str) -> dict[str, Any] | None:
    """One call of one of the prompt's functions: its name, and arguments that its parameters allow."""
    functions = _functions(prompt)
    if not functions:
        return None
    calls = []
    for function in functions:
        call = {
            "name": {"const": function["name"]},
            "arguments": _plain(function.get("parameters") or {"type": "object"}),
        }
        calls.append({"type": "object", "properties": call, "required": [*call], "additionalProperties": False})
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _functions(prompt: str) -> list[dict[str, Any]]:
    decoder = json.JSONDecoder()
    begin = prompt.find("[\n {")
    if begin < 0:
        begin = prompt.find('[{"name"')
    if begin < 0:
        return []
    try:
        found, _ = decoder.raw_decode(prompt, begin)
    except ValueError:
        return []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("name"), str)]


def _plain(part: Any) -> dict[str, Any]:
    """A parameter's schema in JSON Schema's words. Texts and lists are bounded, as a small model may not end them."""
    if not isinstance(part, dict):
        return {}
    kind = _TYPES.get(str(part.get("type")), str(part.get("type")))
    if isinstance(part.get("enum"), list) and part["enum"]:
        return {"enum": part["enum"]}
    if kind not in _PLAIN:
        return _TEXT
    if kind == "string":
        return dict(_TEXT)
    if kind == "array":
        return {"type": "array", "items": _plain(part.get("items")), "maxItems": 4}
    if kind == "object":
        inner = part.get("properties")
        properties = {name: _plain(one) for name, one in inner.items()} if isinstance(inner, dict) else {}
        wanted = part.get("required")
        required = [name for name in wanted if name in properties] if isinstance(wanted, list) else []
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}
