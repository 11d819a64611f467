"""Types of text that UTF-8, Postgres and log lines can hold, and what is common to all fields."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

#: The type of `wrong_within`.
WRONG_WITHIN: Final = "wrong_within"


def _encodable(value: str) -> str:
    # JSON's \ud800 escapes decode to lone surrogates, which UTF-8 cannot encode.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text that UTF-8 can encode, found a lone surrogate at {error.start}") from None
    return value


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """An object's fields but those that are null, as these are left out."""
    if None not in fields.values():
        return fields
    return {name: value for name, value in fields.items() if value is not None}


def wrong_within(field: str, message: str) -> PydanticCustomError:
    """The error of a validator of an object or array about one of its fields; `field` is the path from there."""
    return PydanticCustomError(WRONG_WITHIN, "{message}", {"field": field, "message": message})


def _iso8601(value: object) -> object:
    # Pydantic would also accept seconds since 1970, such as "60".
    if isinstance(value, datetime) or (isinstance(value, str) and "-" in value[1:]):
        return value
    raise ValueError("expected a date and time in ISO 8601 with its offset, such as 2026-01-31T09:00:00Z")


PlainText = Annotated[str, AfterValidator(_encodable)]

#: An identifier from outside: printable ASCII without spaces, so that it is safe in keys, labels and SQL.
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]

#: A task: becomes part of topic names, so Kafka's alphabet without the dot that separates a topic's parts.
TaskName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[a-z0-9][a-z0-9_-]*$")]

#: A caller's free label (customer tier, product).
Label = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]

#: A point in time with its offset from UTC.
Instant = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_iso8601)]
