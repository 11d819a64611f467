"""What all that reads the fields of a job shares: errors about a field within, null, and text that can be sent on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

#: The type of `wrong_within`.
WRONG_WITHIN: Final = "wrong_within"
#: Levels that a value of any form may have, so that its job is written with no more levels than a message may have.
MAX_LEVELS: Final = 24
#: A word that may be repeated: another one may be prompt text.
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


def wrong_within(field: str, message: str) -> PydanticCustomError:
    """The error of a validator of an object or array about one of its fields; `field` is the path from there."""
    return PydanticCustomError(WRONG_WITHIN, "{message}", {"field": field, "message": message})


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """An object's fields but those that are null, as these are left out."""
    if None not in fields.values():
        return fields
    return {name: value for name, value in fields.items() if value is not None}


def shown(value: object) -> str:
    """A word as an error may repeat it, or that there is nothing, or something else."""
    return repr(value) if isinstance(value, str) and _WORD.fullmatch(value) else nothing_or_other(value)


def nothing_or_other(value: object) -> str:
    """What was found, for an error that must not repeat it."""
    return "nothing" if value is None else "another value"


def encodable(value: str) -> str:
    """The text as it is. Raises ValueError for one that UTF-8 cannot encode."""
    # JSON's \ud800 escapes decode to lone surrogates, which UTF-8 cannot encode.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text that UTF-8 can encode, found a lone surrogate at {error.start}") from None
    return value


PlainText = Annotated[str, AfterValidator(encodable)]


def as_json(value: object, *, max_bytes: float = math.inf, separators: tuple[str, str] = (",", ":")) -> str:
    """A value of any form as JSON, its keys in their order.

    Raises ValueError where it is larger, has more than MAX_LEVELS, or cannot be JSON.
    """
    if depth_of(value, most=MAX_LEVELS) > MAX_LEVELS:
        raise ValueError(f"expected at most {MAX_LEVELS} levels of nesting, found more")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
    except (TypeError, ValueError):
        raise ValueError("expected what JSON can write, found a number or a value that it cannot") from None
    if (num_bytes := len(encodable(text).encode())) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes, found {num_bytes}")
    return text


def depth_of(value: object, *, most: int) -> int:
    """Objects and arrays inside one another, 0 of a scalar; no more than `most` + 1 are counted."""
    depth, level = 0, [value]
    while depth <= most and (level := [node for node in level if isinstance(node, dict | list | tuple)]):
        depth += 1
        level = [inner for node in level for inner in (node.values() if isinstance(node, dict) else node)]
    return depth


def refuse_other_keys(value: Mapping[str, Any], known: Collection[str], *, within: str = "") -> None:
    """Refuse a key that is not `known` and not null. The error names it only where it cannot be prompt text."""
    for name, item in value.items():
        if name not in known and item is not None:
            expected = f"expected {', '.join(sorted(known))}"
            if _WORD.fullmatch(name):
                raise wrong_within(f"{within}{name}", f"{expected}, found {name!r}, which is not supported")
            raise (
                wrong_within(within.rstrip("."), f"{expected}, found another key")
                if within
                else ValueError(f"{expected}, found another key")
            )


def kind_of(value: Any) -> str:
    """What kind of JSON value this is, with the value itself only where it cannot be prompt text."""
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return repr(value)[:40]
        case str():
            return f"a string of {len(value)} characters"
        case list() | tuple():
            return f"an array of {len(value)}"
        case dict():
            return f"an object with {len(value)} fields"
        case _:
            return type(value).__name__
