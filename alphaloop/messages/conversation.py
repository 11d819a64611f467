"""A conversation as a job holds it: turns of text, images by address, and calls of tools with what they gave."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from alphaloop.messages.fields import PlainText, encodable, nothing_or_other, shown, without_nulls, wrong_within

MAX_PARTS: Final = 256
MAX_IMAGES: Final = 64  #: of one turn
MAX_CALLS: Final = 128
_IMAGE_ADDRESSES: Final = ("https://", "http://", "data:image/")
#: Fields of OpenAI's messages that would change what the target reads, and that are not honoured.
_UNREAD: Final = ("audio", "function_call", "refusal")
#: Fields of turns of one role.
_OF_ROLES: Final = (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool"))
_USUAL: Final = frozenset({"role", "content"})

Content: TypeAlias = str | tuple[dict[str, Any], ...] | None

_PART_SCHEMAS: Final = [
    {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "image_url"},
            "image_url": {
                "type": "object",
                "properties": {
                    "url": {"type": "string", "pattern": "^(https://|http://|data:image/)"},
                    "detail": {"type": ["string", "null"], "pattern": "^[a-z][a-z0-9_]{0,31}$"},
                },
                "required": ["url"],
            },
        },
        "required": ["type", "image_url"],
    },
]
_TEXT_PARTS_SCHEMA: Final = {"type": "array", "minItems": 1, "maxItems": MAX_PARTS, "items": _PART_SCHEMAS[0]}
_CONTENT_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PARTS, "items": {"anyOf": _PART_SCHEMAS}},
        {"type": "null"},
    ],
    "description": "Text, or its parts, which are put together with nothing between them; parts may be images. "
    "A turn that calls tools may have none.",
}


def _content(value: object) -> Content:
    """Parts that are text alone become one text, with nothing between them."""
    if isinstance(value, str):
        return encodable(value)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError("expected text, or parts of it, found another value")
    if not value:
        raise ValueError("expected text, or parts of it, found an array without a part")
    if len(value) > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS} parts, found {len(value)}")
    parts = tuple(_part(number, part) for number, part in enumerate(value))
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    if (num_images := sum(part["type"] == "image_url" for part in parts)) > MAX_IMAGES:
        raise ValueError(f"expected at most {MAX_IMAGES} images, found {num_images}")
    return parts


def _part(number: int, part: object) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_within(str(number), 'expected {"type": "text", "text": "…"}, found another value')
    match part.get("type"):
        case "text":
            return {"type": "text", "text": _text(f"{number}.text", part.get("text"))}
        case "image_url":
            return {"type": "image_url", "image_url": _image(f"{number}.image_url", part.get("image_url"))}
        case other:
            raise wrong_within(
                f"{number}.type",
                f"expected 'text' or 'image_url', the kinds of content that are read, found {shown(other)}",
            )


def _text(field: str, text: object) -> str:
    if not isinstance(text, str):
        raise wrong_within(field, f"expected a text, found {nothing_or_other(text)}")
    try:
        return encodable(text)
    except ValueError as error:
        raise wrong_within(field, str(error)) from None


def _image(field: str, image: object) -> dict[str, Any]:
    """Where an image lies, and how closely to look at it. A bare address is taken too, as vLLM does."""
    if isinstance(image, str):
        image = {"url": image}
    if not isinstance(image, dict):
        raise wrong_within(field, f'expected {{"url": "…"}}, found {nothing_or_other(image)}')
    url, detail = _text(f"{field}.url", image.get("url")), image.get("detail")
    if not url.startswith(_IMAGE_ADDRESSES):
        raise wrong_within(f"{field}.url", "expected an address that begins with https://, http:// or data:image/")
    if detail is None:
        return {"url": url}
    if shown(detail) == "another value":
        raise wrong_within(f"{field}.detail", "expected auto, low or high, found another value")
    return {"url": url, "detail": detail}


class Prediction(BaseModel):
    """A text that the answer will probably repeat, in OpenAI's form."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    type: Literal["content"]
    content: Annotated[
        str, BeforeValidator(_content), WithJsonSchema({"anyOf": [{"type": "string"}, _TEXT_PARTS_SCHEMA]})
    ] = Field(description="Text, or its parts, which are put together with nothing between them.")


class CalledFunction(BaseModel):
    """Which function was called, and with what."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: PlainText = Field(min_length=1, max_length=128)
    arguments: PlainText = Field(description="As the model wrote them: JSON, as text.")


class PastToolCall(BaseModel):
    """A call that the assistant made earlier in the conversation."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    id: PlainText = Field(min_length=1, max_length=200)
    type: Annotated[
        Literal["function"],
        BeforeValidator(lambda value: "function" if value is None else value),
        WithJsonSchema({"enum": ["function", None]}),
    ] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        strict=True,
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("content", "tool_calls")
            ]
        },
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: PlainText | None = Field(None, max_length=200, description="Who speaks, among several of that role.")
    tool_calls: tuple[PastToolCall, ...] | None = Field(
        None, max_length=MAX_CALLS, strict=False, description="Tools that this turn of the assistant called."
    )
    tool_call_id: PlainText | None = Field(
        None, min_length=1, max_length=200, description="In a tool's turn: the call that it answers."
    )
    reasoning: PlainText | None = Field(
        None, description="What the assistant thought before this turn; reasoning_content is read too."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_spellings(cls, value: Any) -> Any:
        if not isinstance(value, dict) or (value.keys() <= _USUAL and value.get("content") is not None):
            return value
        value = without_nulls(value)
        for name in _UNREAD:
            if value.get(name):
                raise wrong_within(name, f"{name} is not supported; leave it out")
        if value.get("tool_calls") in ([], ()):
            value = {name: item for name, item in value.items() if name != "tool_calls"}
        if (older := value.get("reasoning_content")) is not None:
            if not isinstance(older, str) or value.get("reasoning") not in (None, older):
                raise wrong_within("reasoning_content", "expected the text of reasoning, found another value")
            value = {**value, "reasoning": older}
        if "content" not in value and "tool_calls" not in value:
            raise wrong_within("content", "expected a value, found nothing")
        for name, role in _OF_ROLES:
            if name in value and value.get("role") != role:
                raise wrong_within(name, f"expected {name} in a turn of the {role} alone")
        return value

    @property
    def text(self) -> str:
        """The text of the turn, without its images and calls."""
        if isinstance(self.content, tuple):
            return "".join(part["text"] for part in self.content if part["type"] == "text")
        return self.content or ""

    @property
    def num_images(self) -> int:
        """Images of the turn."""
        return sum(part["type"] == "image_url" for part in self.content) if isinstance(self.content, tuple) else 0
