"""Schemas that fit prompts, and which texts count as instances."""

from __future__ import annotations

import json

from benchmarks.structured.acceptance import _invalid
from benchmarks.structured.schemas import FACTS, PARTIES, REVIEWS, schema_for

FUNCTIONS = [
    {
        "name": "find",
        "parameters": {
            "type": "dict",
            "properties": {
                "place": {"type": "String"},
                "days": {"type": "int"},
                "units": {"type": "str", "enum": ["C", "F"]},
            },
            "required": ["place", "unheard"],
        },
    },
    {"name": "stop"},
]


def test_a_schema_follows_from_the_functions_of_a_prompt() -> None:
    prompt = f"Here is a list.\n{json.dumps(FUNCTIONS, indent=1)}\nWhat now?"
    schema = schema_for("function_calling", prompt)
    assert schema is not None
    assert _invalid('{"name": "find", "arguments": {"place": "x", "days": 3, "units": "C"}}', schema) is None
    assert _invalid('{"name": "stop", "arguments": {}}', schema) is None
    assert _invalid('{"name": "find", "arguments": {"days": 3}}', schema) == ": anyOf"
    assert _invalid("find(x)", schema) == "no JSON"
    assert schema_for("function_calling", "no functions [\n {]") is None


def test_each_extraction_has_the_schema_of_its_kind() -> None:
    words = ("the names of the defendants", "these movie reviews", "the main facts")
    assert [schema_for("extraction", one) for one in words] == [PARTIES, REVIEWS, FACTS]
