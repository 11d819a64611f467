"""What a job's text has to match, compiled for the target's tokens by llguidance; and why it cannot be.

A grammar speaks of bytes, a model of tokens, so `Grammars` belongs to one target. Compiling takes about a millisecond,
masks some microseconds; both follow from the constraint alone, and neither looks at a prompt. What cannot be compiled
is refused before any decoding, with the place in the schema. The library's own words are never repeated, because they
quote the constraint.

How JSON is written is settled here (docs/decisions/0041-structured-output.md): one line, `", "` and `": "` between the
parts, as Python's json.dumps has it. A schema's own `x-guidance` may say otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from alphaloop.errors import InvalidField
from alphaloop.messages import Constraint
from alphaloop.messages.fields import MAX_LEVELS, depth_of

#: Bytes of a constraint's source, at most. The largest of 570 schemas in use had 15 kB.
MAX_SOURCE_BYTES: Final = 131_072
#: Compiled grammars that are kept; one takes up to some MB.
MAX_KEPT: Final = 128
#: Compilations that look for the place of a fault, at most.
_MAX_TRIES: Final = 200
#: Steps of the library, which bound its time: about 100 ms to compile, 20 ms for a mask, and 100 MB of states.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
#: How the engine writes JSON where a schema does not say otherwise, as the schema's `x-guidance`. Without `\u` a text
#: has one spelling: otherwise `\u0061` would be a name beside the declared name `a`, or one that no pattern knows.
JSON_STYLE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}

#: Control characters without a short escape: as they are, and in an expression, whose classes of several are cut down.
_UNWRITTEN: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_UNWRITTEN_IN_PATTERN: Final = re.compile(
    _UNWRITTEN.pattern + r"|(?<!\\)(\\\\)*\\(x[01{]|x7[fF]|u00[01]|u007[fF]|u\{|[va])"
)
_CLASS: Final = re.compile(r"\[[^\]]{5,}\]")
_NAME: Final = re.compile(r"[A-Za-z_$][\w$-]{0,63}", re.ASCII)
#: Where a schema holds schemas: by name, in a list, or alone.
_BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_IN_ORDER: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE: Final = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_DEFINITIONS: Final = ("$schema", "$defs", "definitions")
#: How an error of the library begins; the keyword at fault, where it is known; and what was expected.
_FAULTS: Final = (
    ("oneOf constraints", ("oneOf",), "oneOf whose branches exclude each other; write anyOf where that is meant"),
    ("Unknown format", ("format",), "a format that JSON Schema defines and a grammar can write"),
    ("min/maxProperties", ("minProperties", "maxProperties"), "a number of properties only where all are required"),
    ("are not disjoint", ("patternProperties",), "patterns of which no name matches two"),
    ("Unsatisfiable schema", (), "a schema that some text matches"),
    ("Resource '", ("$ref",), "a reference to a place within the schema"),
    ("Pointer", ("$ref",), "a reference to a place within the schema"),
    ("schema too large", (), "a schema with fewer combinations"),
    ("grammar size", (), "a smaller schema"),
    ("regex parse error", ("pattern",), "an expression without look-around or back references"),
    ("invalid regex", ("pattern",), "an expression without look-around or back references"),
)
_KINDS: Final = {
    "json_schema": "a JSON Schema",
    "json_object": "a JSON object",
    "regex": "a regular expression without look-around or back references",
    "choice": "a JSON array of texts",
    "grammar": "a grammar in Lark's form",
    "tools": "a target whose form of calls is known",
}

Path = tuple[str | int, ...]


class Grammars:
    """The compiled constraints of one target, the last MAX_KEPT of them; those that were refused too."""

    def __init__(self, tokenizer: Any, num_columns: int, end_tokens: frozenset[int]) -> None:
        """`num_columns`: of the target's logits; what the tokenizer lacks of them is never allowed."""
        self._tokenizer = tokenizer
        self.num_columns = num_columns
        self.end_tokens = end_tokens
        #: Whether tokens that are the only ones allowed are taken without a pass; off, texts are the same.
        self.takes_forced = True
        self._kept: dict[bytes, LLMatcher | InvalidField] = {}

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The bytes of every token. Raises ValueError for a tokenizer whose tokens have no bytes of their own."""
        return tokens_with_bytes(self._tokenizer, self.num_columns, self.end_tokens)

    @cached_property
    def executor(self) -> LLExecutor:
        """The library's threads, on which masks are computed."""
        return LLExecutor()

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Waits for them while the device works."""
        return ThreadPoolExecutor(1, "masks")

    def compiled(self, constraint: Constraint) -> LLMatcher:
        """A matcher at the beginning of a text, the caller's own. Raises InvalidField."""
        key = hashlib.sha256(f"{constraint.kind}\0{constraint.field}\0{constraint.source}".encode()).digest()
        matcher = self._kept.pop(key, None) or self._compile(constraint)
        self._kept[key] = matcher
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        if isinstance(matcher, InvalidField):
            raise InvalidField(matcher.message, field=matcher.field, hint=matcher.hint)
        return matcher.deep_copy()

    def _compile(self, constraint: Constraint) -> LLMatcher | InvalidField:
        try:
            return self._compile_or_raise(constraint)
        except InvalidField as error:
            return error

    def _compile_or_raise(self, constraint: Constraint) -> LLMatcher:
        field = constraint.field
        if (num_bytes := len(constraint.source.encode())) > MAX_SOURCE_BYTES:
            raise InvalidField(f"expected at most {MAX_SOURCE_BYTES} bytes, found {num_bytes}", field=field)
        try:
            tokens = self.tokens
        except ValueError as error:
            raise InvalidField(
                "expected no constraint, because the target's tokens have no bytes of their own",
                field=field,
                hint="send the job to a target with a byte-level or SentencePiece tokenizer",
            ) from error
        schema: Any = None
        if constraint.kind in ("json_schema", "json_object"):
            schema = {"type": "object"} if constraint.kind == "json_object" else _parsed(constraint)
            if (depth := depth_of(schema, most=MAX_LEVELS)) > MAX_LEVELS:
                raise InvalidField(f"expected at most {MAX_LEVELS} levels, found {depth}", field=field)
            refuse_unkept(schema, field)
        try:
            grammar = _grammar_of(constraint, schema)
        except ValueError as error:
            raise InvalidField(f"expected {_KINDS[constraint.kind]}, found something else", field=field) from error
        matcher = _matcher(tokens, grammar)
        if not matcher.is_error():
            # Some grammars fail, or turn out to have no text, only at their first mask.
            matcher.compute_ff_tokens()
            matcher.compute_bitmask()
        if not matcher.is_error():
            return _matcher(tokens, grammar)
        if isinstance(schema, dict):
            raise _fault_in(schema, field, lambda part: _error_of(tokens, part))
        raise InvalidField(f"expected {_KINDS[constraint.kind]} that some text matches and that compiles", field=field)


def tokens_with_bytes(tokenizer: Any, num_columns: int, end_tokens: frozenset[int]) -> LLTokenizer:
    """The library's view of a tokenizer: each token's bytes, and how forced text is tokenized.

    It knows byte-level and byte-fallback tokenizers by their decoder. A SentencePiece vocabulary without bytes is given
    as byte-fallback: its tokens are their letters, with ▁ for a space. In other tokenizers a token's text depends on
    its neighbours. Raises ValueError for those.
    """
    if not tokenizer.is_fast:
        raise ValueError("not a tokenizer of the library tokenizers")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["padding"] = content["truncation"] = None
    if (content["decoder"] or {}).get("type") == "Metaspace":
        spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        content["decoder"] = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    return LLTokenizer(json.dumps(content), n_vocab=max(num_columns, num_tokens), eos_token=sorted(end_tokens) or None)


def _parsed(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise InvalidField("expected a JSON Schema, found no JSON", field=constraint.field) from error


def _grammar_of(constraint: Constraint, schema: Any) -> str:
    """The library's own form. Raises ValueError for what has not even the right shape."""
    match constraint.kind:
        case "json_schema" | "json_object":
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object, or true or false")
            return _of_schema(schema)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.source)
        case "choice":
            choices = json.loads(constraint.source)
            if not (isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)):
                raise ValueError("choices are an array of texts")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        case "grammar":
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(constraint.source))
            except Exception as error:  # the converter promises no types
                raise ValueError("neither Lark nor GBNF") from error
        case _:
            raise ValueError("tools are a grammar in the form of the target's calls, which it does not have")


def refuse_unkept(schema: Any, field: str) -> None:
    """Raise InvalidField for what the library compiles and its masks do not keep to.

    More names than are sure to differ, because no mask knows which names a text has; a control character that JSON
    writes with `\\u`, because the library leaves it out.
    """
    for part in _all_parts(schema) if isinstance(schema, dict) else ():
        others, patterns, least = map(part.schema.get, ("additionalProperties", "patternProperties", "minProperties"))
        required = part.schema.get("required")
        most = max(1, len(set(map(str, required))) if isinstance(required, list) else 0)
        if (patterns or others is not False) and isinstance(least, int) and least > most:
            raise InvalidField(
                f"expected at most {most}, or more required names, found {least}, because a text may repeat a name",
                field=".".join((field, *_shown((*part.path, "minProperties"), schema))),
                hint="name what is required, or send the job to a server that takes it",
            )
        for keyword in ("const", "enum", "pattern", "patternProperties"):
            is_pattern = keyword.startswith("pattern")
            unwritten = _UNWRITTEN_IN_PATTERN if is_pattern else _UNWRITTEN
            value = part.schema.get(keyword)
            texts = value if keyword == "patternProperties" and isinstance(value, dict) else _texts(value)
            if any(unwritten.search(_CLASS.sub("", text) if is_pattern else text) for text in texts):
                raise InvalidField(
                    "expected no control character but \\b, \\t, \\n, \\f and \\r, found another one",
                    field=".".join((field, *_shown((*part.path, keyword), schema))),
                    hint="leave it out, or send the job to a server that takes it",
                )


def _texts(value: Any) -> Iterator[str]:
    """The strings that it consists of."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS)


def _error_of(tokens: LLTokenizer, schema: Mapping[str, Any]) -> str:
    """The first line of what the library says of a schema; empty where it compiles."""
    return _matcher(tokens, _of_schema(schema)).get_error().partition("\n")[0]


def _of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_STYLE)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Part:
    """A schema inside the root's, and where it stands."""

    path: Path
    schema: dict[str, Any]


def _fault_in(schema: dict[str, Any], field: str, error_of: Callable[[Mapping[str, Any]], str]) -> InvalidField:
    """The error for a schema that does not compile, with the deepest place that fails in the same way alone."""
    definitions: dict[str, Any] = {name: schema[name] for name in _DEFINITIONS if name in schema}
    part, wrong = _Part((), schema), error_of(schema)
    failing, num_tries = [part], 0
    is_deeper = True
    while is_deeper:
        is_deeper = False
        for inner in _parts_of(part, schema):
            num_tries += 1
            if num_tries > _MAX_TRIES or any(inner.path == above.path for above in failing):
                continue
            if error_of({**definitions, **inner.schema}) == wrong:
                part, is_deeper = inner, True
                failing.append(part)
                break
    # A part that refers to one of those above it fails as that one does.
    part = next((above for above in reversed(failing) if _reason(wrong, above.schema)[0]), part)
    keyword, expected = _reason(wrong, part.schema)
    path = part.path if keyword is None else (*part.path, keyword)
    return InvalidField(
        f"expected {expected}",
        field=".".join((field, *_shown(path, schema))),
        hint="write the schema without it, or send the job to a server that takes it",
    )


def _reason(wrong: str, schema: Mapping[str, Any]) -> tuple[str | None, str]:
    """The keyword at fault, where it is known, and what was expected instead."""
    if wrong.startswith("Unimplemented keys: ["):
        named = re.findall(r'"([^"]+)"', wrong)
        keyword = next((name for name in named if name in schema and _NAME.fullmatch(name)), None)
        return keyword, "a schema without this keyword, which no grammar here can keep to"
    for begin, keywords, expected in _FAULTS:
        if begin in wrong:
            return next((keyword for keyword in keywords if keyword in schema), None), expected
    return None, "a schema that some text matches and that compiles"


def _all_parts(root: dict[str, Any]) -> Iterator[_Part]:
    """It, and every schema inside, once each: those that a reference names too, wherever they stand."""
    seen, waiting = set[Path](), [_Part((), root)]
    while waiting:
        part = waiting.pop()
        if part.path not in seen:
            seen.add(part.path)
            yield part
            waiting += _parts_of(part, root)


def _parts_of(part: _Part, root: Mapping[str, Any]) -> Iterator[_Part]:
    for key in _BY_NAME:
        inner = part.schema.get(key)
        for name, schema in inner.items() if isinstance(inner, dict) else ():
            if isinstance(schema, dict):
                yield _Part((*part.path, key, name), schema)
    for key in _IN_ORDER:
        inner = part.schema.get(key)
        for place, schema in enumerate(inner) if isinstance(inner, list) else ():
            if isinstance(schema, dict):
                yield _Part((*part.path, key, place), schema)
    for key in _ALONE:
        if isinstance(inner := part.schema.get(key), dict):
            yield _Part((*part.path, key), inner)
    if isinstance(reference := part.schema.get("$ref"), str) and (found := _referred(reference, root)) is not None:
        yield found


def _referred(reference: str, root: Mapping[str, Any]) -> _Part | None:
    """The part that `#/definitions/name` stands for."""
    if not reference.startswith("#/"):
        return None
    path: list[str | int] = []
    here: Any = root
    for piece in unquote(reference[2:]).split("/"):
        name = piece.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
            path.append(name)
        elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
            here = here[int(name)]
            path.append(int(name))
        else:
            return None
    return _Part(tuple(path), here) if isinstance(here, dict) else None


def _shown(path: Path, root: Any) -> Iterator[str]:
    """The path's pieces; a name that is not plain is given by its place, because it may be any text."""
    here = root
    for piece in path:
        if isinstance(piece, int) or _NAME.fullmatch(piece):
            yield str(piece)
        else:
            yield f"#{list(here).index(piece)}" if isinstance(here, dict) and piece in here else "#"
        try:
            here = here[piece]
        except (KeyError, IndexError, TypeError):
            here = None
