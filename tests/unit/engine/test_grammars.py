"""What compiles, what is refused with which path, and how tokenizers are told to the library."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any, Final

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.errors import InvalidField
from alphaloop.messages import Constraint
from alphaloop.messages.fields import MAX_LEVELS, depth_of
from engine import grammars
from engine.constraint import ConstrainedText
from engine.grammars import MAX_SOURCE_BYTES, Grammars
from engine.proposal import Proposal
from tests.fixtures.models import LEARNT, TOKENIZERS, make_tiny_tokenizer

FIELD: Final = "body.response_format.json_schema.schema"
SECRET: Final = "the prompt's own words"


@functools.cache
def tiny_grammars() -> Grammars:
    tokenizer = make_tiny_tokenizer()
    return Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))


@pytest.fixture
def compiler() -> Grammars:
    return tiny_grammars()


def of_schema(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema), FIELD)


#: By keyword: a schema, and JSON that does not validate.
KEYWORDS: Final[tuple[tuple[Any, str], ...]] = (
    ({"type": "object", "minProperties": 1}, "{}"),
    ({"additionalProperties": {"type": "integer"}, "minProperties": 2, "required": ["b"]}, '{"b": 1}'),
    ({"additionalProperties": {"type": "integer"}, "minProperties": 2}, '{"a": 1, "a": 1}'),
    ({"maxProperties": 1}, '{"a": 1, "b": 1}'),
    ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061": "x"}'),
    ({"properties": {"é": {"type": "integer"}}, "required": ["é"]}, r'{"é": 1, "\u00e9": "x"}'),
    ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, '{"a": 1, "a": "x"}'),
    ({"properties": {"b": {"properties": {"a": {"type": "integer"}}}}}, r'{"b": {"\u0061": "x"}}'),
    ({"$ref": "#/definitions/x", "definitions": {"x": {"properties": {"a": {"type": "null"}}}}}, r'{"\u0061": 1}'),
    ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}, r'{"\u0061": 1}'),
    ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b": "x"}'),
    (
        {"properties": {"a": {"type": "null"}, "b": {"patternProperties": {"^c": {"type": "integer"}}}}},
        r'{"\u0061": 1}',
    ),
    ({"properties": {'"\n/': {"type": "null"}}}, r'{"\u0022\u000a\/": 1}'),
    ({"required": ["a", "a", "a"], "minProperties": 3}, '{"a": 1, "b": 1, "b": 1}'),
    ({"$ref": "#/components/x%20y", "components": {"x y": {"minProperties": 2}}}, '{"a": 1, "a": 1}'),
    ({"const": {"a": ["a\u0001"]}}, '{"a": ["a"]}'),
    ({"enum": ["a\x7f"]}, '"a"'),
    ({"type": "string", "pattern": r"^a\x01$"}, '"a"'),
    ({"type": "string", "pattern": "^a\u0001$"}, '"a"'),
    ({"type": "string", "pattern": r"^a[\v]$"}, '"a"'),
    ({"type": "string", "pattern": r"^a[\x00-\x1fb]$"}, '"a"'),
    ({"patternProperties": {r"^a\x01$": {}}, "additionalProperties": False}, '{"a": 1}'),
    ({"properties": {"a": {}}, "required": ["z"]}, '{"a": 1}'),
    ({"required": ["a"], "additionalProperties": False, "properties": {"a": {}}}, '{"a": 1, "b": 1}'),
    ({"patternProperties": {"^a": {"type": "integer"}}}, '{"ab": "x"}'),
    ({"properties": {"ab": {"type": "string"}}, "patternProperties": {"^a": {"type": "integer"}}}, '{"ab": "x"}'),
    ({"patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "string"}}}, '{"ab": "x"}'),
    ({"propertyNames": {"pattern": "^a"}}, '{"b": 1}'),
    ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}'),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}, '{"a": 1}'),
    ({"unevaluatedProperties": False, "properties": {"a": {}}}, '{"b": 1}'),
    ({"not": {"type": "integer"}}, "1"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "1"),
    ({"uniqueItems": True}, "[1, 1]"),
    ({"contains": {"type": "string"}}, "[1]"),
    ({"contains": {}, "minContains": 2}, "[1]"),
    ({"contains": {}, "maxContains": 1}, "[1, 1]"),
    ({"prefixItems": [{"type": "integer"}], "items": False}, "[1, 2]"),
    ({"prefixItems": [{"type": "integer"}, {}], "minItems": 2}, "[1]"),
    ({"prefixItems": [{}], "unevaluatedItems": False}, "[1, 2]"),
    ({"minItems": 2, "type": "array"}, "[1]"),
    ({"maxItems": 0, "type": "array"}, "[1]"),
    ({"type": "string", "format": "date"}, '"2020-02-31"'),
    ({"type": "string", "format": "idn-email"}, '"a"'),
    ({"type": "string", "minLength": 2}, r'"\n"'),
    ({"type": "string", "maxLength": 1}, '"ab"'),
    ({"type": "string", "pattern": "b"}, '"a"'),
    ({"type": "string", "pattern": "^a*$", "maxLength": 2}, '"aaa"'),
    ({"type": "integer", "multipleOf": 3}, "4"),
    ({"type": "number", "multipleOf": 0.1}, "0.15"),
    ({"type": "number", "minimum": 3}, "5e-1"),
    ({"type": "number", "exclusiveMinimum": 3}, "3.0"),
    ({"type": "number", "maximum": 5}, "1e999"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    ({"allOf": [{"minimum": 1}, {"maximum": 5, "type": "integer"}]}, "7"),
    ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "{}"),
    ({"const": {"a": 1}}, '{"a": 1, "a": 2}'),
    ({"enum": ["a"]}, '"b"'),
    ({"$ref": "#/$defs/x", "maximum": 5, "$defs": {"x": {"type": "integer"}}}, "7"),
    ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "string"}}}, "1"),
)


@pytest.mark.parametrize(("schema", "text"), KEYWORDS, ids=[f"{next(iter(one))} {text}" for one, text in KEYWORDS])
def test_what_does_not_validate_is_not_written_or_its_schema_is_refused_with_a_path(
    compiler: Grammars, schema: Any, text: str
) -> None:
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checks = jsonschema.FormatChecker() if "format" in schema else None
    assert not judge(schema, format_checker=checks).is_valid(json.loads(text)) or schema.get("format") == "idn-email"
    try:
        matcher = compiler.compiled(of_schema(schema))
    except InvalidField as error:
        keyword = (error.field or "").removeprefix(f"{FIELD}.").split(".")[-1]
        named = keyword in json.dumps(schema)
    else:
        tokens = compiler.tokens.tokenize_str(text)
        named = not (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    assert named


WRITTEN: Final = (
    {"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2, "required": ["é", "a"]},
    {"type": "object", "properties": {"a": {"properties": {"b": {"type": "null"}}}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"properties": {"a": {"const": 1}}}}},
    {"anyOf": [{"properties": {"a": {"type": "null"}}, "type": "object"}, {"type": "array", "maxItems": 2}]},
    {"properties": {"a": {}}, "patternProperties": {"^b": {"type": "null"}}, "additionalProperties": False},
    {"properties": {"a": {"type": "null"}}, "patternProperties": {"^b": {"type": "null"}}},
    {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}, "required": ["b"]},
)  # fmt: skip


@settings(max_examples=200, derandomize=True)
@given(schema=st.sampled_from(WRITTEN), seed=st.integers(0, 2**32))
def test_a_text_that_ends_by_itself_validates(schema: Any, seed: int) -> None:
    """Any tokens that masks allow, by a model that likes to repeat names and to write them with escapes."""
    chance, compiler = random.Random(seed), tiny_grammars()
    matcher, written = compiler.compiled(of_schema(schema)), list[int]()
    for _ in range(60):
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5):
            break
        name = chance.choice(["a", "b", "é"])
        if chance.random() < 0.5 and compiler.tokens.decode_str(written).endswith(('{"', ', "')):
            tokens = compiler.tokens.tokenize_str(chance.choice([name, f"\\u{ord(name):04x}"]) + '": ')
            written += tokens[: matcher.try_consume_tokens(tokens)]
            continue
        allowed = list(ids(matcher, compiler.num_columns))
        short = [
            one for one in allowed if len(compiler.tokens.decode_bytes([one])) == 1 and one not in compiler.end_tokens
        ]
        token = chance.choice(
            [one for one in short if compiler.tokens.decode_bytes([one]) in b'"{}[],:'] or short or allowed
        )
        if token in compiler.end_tokens:
            break
        assert matcher.consume_token(token)
        written.append(token)
    if matcher.is_accepting():
        value = json.loads(compiler.tokens.decode_str(written))
        jsonschema.Draft202012Validator(schema).validate(value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BAD: Final = {"type": "string", "format": SECRET}
REFUSED: Final[list[tuple[Any, str]]] = [
    ({"properties": {"a": {"items": BAD}}}, "properties.a.items.format"),
    ({"properties": {SECRET: BAD, "b": {}}}, "properties.#0.format"),
    ({"anyOf": [{"type": "null"}, {"properties": {"a": {"not": {"type": "null"}}}}]}, "anyOf.1.properties.a.not"),
    ({"$ref": "#/definitions/x", "definitions": {"x": BAD}}, "definitions.x.format"),
    (
        {
            "items": {"$ref": "#/$defs/x"},
            "$defs": {"x": {"oneOf": [{"items": {"$ref": "#/$defs/x"}}, {"minItems": 1}]}},
        },
        "$defs.x.oneOf",
    ),
    ({"properties": {"a": {"type": "string", "pattern": f"(?={SECRET})x"}}}, "properties.a.pattern"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"additionalProperties": {"type": "integer"}, "minProperties": 3}, "minProperties"),
    ({"properties": {"a": {"required": ["b"], "minProperties": 3}}}, "properties.a.minProperties"),
    (
        {"$ref": "#/$defs/x", "$defs": {"x": {"patternProperties": {"^a": {}}, "minProperties": 2}}},
        "$defs.x.minProperties",
    ),
    ({"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}}, "patternProperties"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    ({"$ref": "https://example.com/schema.json"}, "$ref"),
    (False, ""),
    (nested(MAX_LEVELS + 1), ""),
    ([1], ""),
]


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=[path or str(n) for n, (_, path) in enumerate(REFUSED)])
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_path(compiler: Grammars, schema: Any, path: str) -> None:
    for _ in range(2):  # a refusal is remembered too
        with pytest.raises(InvalidField) as caught:
            compiler.compiled(of_schema(schema))
        assert caught.value.field == (f"{FIELD}.{path}" if path else caught.value.field)
        assert (caught.value.field or "").startswith(FIELD)
        assert SECRET not in f"{caught.value}{caught.value.field}"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", f"(?<={SECRET})b"),
        ("regex", "a" * (MAX_SOURCE_BYTES + 1)),
        ("regex", "(" * 10_000),
        ("grammar", f"start: {SECRET}"),
        ("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("choice", "{"),
        ("json_schema", "{"),
        ("json_schema", "[" * 100_000),
        ("tools", "{}"),
    ],
)
def test_what_is_no_grammar_is_refused_without_its_words(compiler: Grammars, kind: Any, source: str) -> None:
    with pytest.raises(InvalidField) as caught:
        compiler.compiled(Constraint(kind, source, "body.structured_outputs.x"))
    assert caught.value.field == "body.structured_outputs.x"
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("json_schema", '{"type": "integer"}', "12", "x"),
        ("json_schema", '{"x-guidance": {"whitespace_flexible": true}, "items": {"type": "null"}}', "[ null ]", "x"),
        ("regex", "[a-c]+d", "abcd", "abd!"),
        ("choice", json.dumps(['"quoted"', "new\nline", "é, yes"]), "é, yes", "no"),
        ("choice", json.dumps(['"quoted"', "new\nline", "é, yes"]), '"quoted"', "quoted"),
        ("grammar", 'start: "a" b\nb: /[0-9]+/', "a17", "b"),
        ("grammar", 'root ::= "a" [0-9]+', "a17", "b"),
    ],
)
def test_each_kind_takes_what_matches_it(compiler: Grammars, kind: Any, source: str, right: str, wrong: str) -> None:
    matcher = compiler.compiled(Constraint(kind, source, "body.x"))
    tokens = compiler.tokens.tokenize_str(right)
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()
    tokens = compiler.tokens.tokenize_str(wrong)
    matcher = compiler.compiled(Constraint(kind, source, "body.x"))
    assert not (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_json_is_written_on_one_line(compiler: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    text = ConstrainedText.of(compiler, of_schema(schema | {"additionalProperties": False}))
    written = compiler.tokens.decode_str(text.take_beginning(100))
    assert '{"a": 1, "b": [1, 2]}'.startswith(written)
    assert len(written) > len('{"a": 1, "b": [1, ')


def test_only_so_many_are_kept(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    compiler._kept.clear()
    for number in (1, 2, 1, 3):
        compiler.compiled(of_schema({"const": number}))
    assert len(compiler._kept) == 2
    kept = dict(compiler._kept)
    compiler.compiled(of_schema({"const": 1}))
    assert {key: id(one) for key, one in compiler._kept.items()} == {key: id(one) for key, one in kept.items()}


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_as_it_stands", "metaspace"])
def test_tokens_have_the_bytes_that_they_decode_to(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    told = grammars.tokens_with_bytes(tokenizer, len(tokenizer) + 5, frozenset({tokenizer.eos_token_id}))
    assert told.vocab_size >= len(tokenizer) + 5
    assert told.eos_tokens == [tokenizer.eos_token_id]
    for text in LEARNT:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert told.decode_bytes(ids).decode().strip() == tokenizer.decode(ids).strip()
        assert tokenizer.unk_token_id not in ids or name == "metaspace"
    special = tokenizer.convert_tokens_to_ids("<|x|>")
    assert b"\xff" in told.decode_bytes([special]) or told.is_special_token(special)


@pytest.mark.parametrize("name", ["word_ends", "word_pieces"])
def test_a_tokenizer_whose_tokens_have_no_bytes_takes_no_constraint(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    compiler = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    with pytest.raises(InvalidField, match="no bytes of their own"):
        compiler.compiled(of_schema({"type": "integer"}))


def test_depth_is_found_without_recursion() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert depth_of(deep, most=MAX_LEVELS) == MAX_LEVELS + 1
    assert [depth_of(one, most=MAX_LEVELS) for one in (1, {}, {"a": [1, {"b": 2}]})] == [0, 1, 3]
    _unwind(deep)


def _unwind(deep: Any) -> None:
    # Python frees a deep list recursively.
    while deep:
        deep = deep.pop()


def ids(matcher: Any, columns: int) -> Iterator[int]:
    bits = matcher.compute_bitmask()
    return (token for token in range(columns) if bits[token >> 3] >> (token & 7) & 1)


def test_a_forced_token_is_the_only_one_in_the_mask(compiler: Grammars) -> None:
    schema = {
        "properties": {
            "name": {"type": "string"},
            "tags": {"items": {"enum": ["one", "other"]}},
            "n": {"type": "number"},
        },
        "required": ["name", "tags", "n"],
        "additionalProperties": False,
    }
    matcher = compiler.compiled(of_schema(schema))
    num_forced = 0
    for token in compiler.tokens.tokenize_str('{"name": "a \\"b\\"", "tags": ["other", "one"], "n": -1.5}'):
        allowed = list(ids(matcher, compiler.num_columns))
        forced = matcher.compute_ff_tokens()
        assert (forced[:1] == allowed) == (len(allowed) == 1)
        num_forced += bool(forced)
        assert token in allowed
        assert matcher.consume_token(token)
    assert matcher.is_accepting()
    assert num_forced > 5


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (
            "json_schema",
            json.dumps({"properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "number"}}}),
        ),
        ("json_object", "{}"),
        ("regex", "(the |other )*thing[0-9]{2,20}!"),
        ("choice", json.dumps(["yes", "no, never", "yes, perhaps"])),
    ],
)
def test_single_tokens_are_allowed_exactly_where_masks_allow_them(
    compiler: Grammars, kind: Any, source: str, rng: random.Random
) -> None:
    """Behind a text and drafts alike: greedy texts rest on it."""
    constraint = Constraint(kind, source, FIELD)
    text, matcher = ConstrainedText.of(compiler, constraint), compiler.compiled(constraint)
    path: tuple[int, ...] = ()
    for number in range(40):
        allowed = set(ids(matcher, compiler.num_columns))
        assert allowed == {token for token in range(compiler.num_columns) if text._allows(path, token)}
        if not (going_on := sorted(allowed - compiler.end_tokens)):
            break
        path = (*path, rng.choice(going_on))
        assert matcher.consume_token(path[-1])
        if number % 3 == 2:
            for token in path:
                text.take(token)
            path = ()
    assert number > 2


def test_only_masks_after_likeliest_drafts_are_looked_at(compiler: Grammars) -> None:
    """The likeliest allowed token of every row that a greedy text can go on behind, and no mask where it is allowed."""
    text = ConstrainedText.of(compiler, Constraint("regex", "[ab]{3}", FIELD))
    a, b, z = (compiler.tokens.tokenize_str(letter)[0] for letter in "abz")
    scores = torch.zeros(4, compiler.num_columns)
    scores[0, a], scores[1, z], scores[1, b], scores[2, a], scores[3, z] = 3.0, 3.0, 2.0, 3.0, 3.0
    unchanged = scores.clone()
    paths = [(), (a,), (a, b), (a, a)]
    assert text.best([a, z, a, z], scores, paths) == [a, b, a, z]
    assert text._masks.keys() == {(a,)}
    assert torch.equal(scores, unchanged)
    text.take(b)
    assert text.best([z], scores[1:2], [()]) == [b]


def test_of_a_tree_another_spelling_of_what_must_follow_is_cut(compiler: Grammars) -> None:
    """The library takes it; the masks, and so the text, do not."""
    text = ConstrainedText.of(compiler, of_schema({"enum": ["a the time", "b the time"]}))
    (first, *_) = compiler.tokens.tokenize_str('"a')
    matcher = compiler.compiled(of_schema({"enum": ["a the time", "b the time"]}))
    written = compiler.tokens.tokenize_str('"a the time"')
    found = []
    for place, token in enumerate(written):
        forced = matcher.compute_ff_tokens()
        others = [
            one for one in range(compiler.num_columns) if matcher.validate_tokens([one]) == 1 and [one] != forced[:1]
        ]
        if forced and others:
            tree = Proposal((*written[:place], others[0], forced[0]), (*range(-1, place - 1), place - 1, place - 1))
            fitted = text.fit(tree, 100, "lookup")
            assert fitted.tokens == (*written[:place], forced[0])
            found.append(place)
        assert matcher.consume_token(token)
    assert found
    assert first == written[0]


def test_a_text_may_end_where_it_matches_and_never_after_a_failed_grammar(compiler: Grammars) -> None:
    text = ConstrainedText.of(compiler, Constraint("regex", "a+b", "body.x"))
    text.takes_forced = False
    for token in compiler.tokens.tokenize_str("aab"):
        assert not text.may_end
        text.take(token)
    assert text.may_end
    failed = compiler.compiled(Constraint("regex", "a*", "body.x"))
    assert ConstrainedText(compiler, failed).may_end
    assert not failed.consume_token(compiler.tokens.tokenize_str("x")[0])
    assert failed.is_error()
    assert not ConstrainedText(compiler, failed).may_end
