"""Every field that OpenAI's client can send to files, batches, chats and completions, and what becomes of it.

The names come from the client's own types, so a new version with a new field fails the test until it stands here.

    python -m tests.sdk_bodies.fields        writes docs/reference/openai-fields.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from openai.types import (
    batch_create_params,
    batch_list_params,
    completion_create_params,
    file_create_params,
    file_list_params,
)
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionContentPartRefusalParam,
    ChatCompletionMessageParam,
    ChatCompletionMessageToolCallUnionParam,
    ChatCompletionToolChoiceOptionParam,
    ChatCompletionToolUnionParam,
    chat_completion_allowed_tools_param,
    chat_completion_content_part_image_param,
    chat_completion_message_function_tool_call_param,
    chat_completion_named_tool_choice_param,
    chat_completion_prediction_content_param,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared_params import FunctionDefinition, response_format_json_schema
from typing_extensions import is_typeddict

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "openai-fields.md"
HONOURED, REFUSED, NO_EFFECT = "honoured", "refused by its name", "without effect"


class Entry(NamedTuple):
    """What becomes of a field. `value` is one that shows it, in a line of a batch."""

    verdict: str
    value: Any = None
    remark: str = ""


def typed(kind: Any) -> tuple[Any, ...]:
    """The objects with named fields within a type: in a union, an array, a wrapper."""
    if is_typeddict(kind):
        return (kind,)
    return () if get_origin(kind) is Literal else tuple(one for part in get_args(kind) for one in typed(part))


TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "files.create": (file_create_params.FileCreateParams,),
    "files.create, expires_after": (file_create_params.ExpiresAfter,),
    "files.list": (file_list_params.FileListParams,),
    "batches.create": (batch_create_params.BatchCreateParams,),
    "batches.create, output_expires_after": (batch_create_params.OutputExpiresAfter,),
    "batches.list": (batch_list_params.BatchListParams,),
    "chat.completions.create": (
        chat_params.CompletionCreateParamsNonStreaming,
        chat_params.CompletionCreateParamsStreaming,
    ),
    "chat.completions.create, prediction": (
        chat_completion_prediction_content_param.ChatCompletionPredictionContentParam,
    ),
    "chat.completions.create, messages": get_args(ChatCompletionMessageParam),
    "chat.completions.create, content parts": (
        *get_args(ChatCompletionContentPartParam),
        ChatCompletionContentPartRefusalParam,
    ),
    "chat.completions.create, image_url": (chat_completion_content_part_image_param.ImageURL,),
    "chat.completions.create, tool_calls": get_args(ChatCompletionMessageToolCallUnionParam),
    "chat.completions.create, function of tool_calls": (chat_completion_message_function_tool_call_param.Function,),
    "chat.completions.create, tools": get_args(ChatCompletionToolUnionParam),
    "chat.completions.create, function of tools": (FunctionDefinition,),
    "chat.completions.create, tool_choice": typed(ChatCompletionToolChoiceOptionParam),
    "chat.completions.create, function of tool_choice": (chat_completion_named_tool_choice_param.Function,),
    "chat.completions.create, allowed_tools": (chat_completion_allowed_tools_param.ChatCompletionAllowedToolsParam,),
    "chat.completions.create, response_format": get_args(chat_params.ResponseFormat),
    "chat.completions.create, json_schema": (response_format_json_schema.JSONSchema,),
    "completions.create": (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
}
#: What the client distinguishes by a field, and which.
KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "chat.completions.create, role of a message": (ChatCompletionMessageParam, "role"),
    "chat.completions.create, type of a content part": (
        ChatCompletionContentPartParam | ChatCompletionContentPartRefusalParam,
        "type",
    ),
    "chat.completions.create, type of a tool": (ChatCompletionToolUnionParam, "type"),
    "chat.completions.create, type of tool_choice": (ChatCompletionToolChoiceOptionParam, "type"),
    "chat.completions.create, type of response_format": (chat_params.ResponseFormat, "type"),
}
CALLED: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAID: Final = [{"role": "user", "content": "Hello"}]
_ACCOUNT: Final = "a matter of OpenAI's accounts; named in `ignored_fields` of the result"
_CACHE: Final = "prefixes that texts share are read once without being asked; named in `ignored_fields`"
_BATCH_STREAM: Final = "in a batch; a job on Kafka streams to the topic `tokens`"
_BOTH: Final = {
    "frequency_penalty": Entry(HONOURED, 0.5),
    "logit_bias": Entry(HONOURED, {"5": -100}),
    "max_tokens": Entry(HONOURED, 8),
    "model": Entry(HONOURED, "served", "must be the model that is served"),
    "n": Entry(HONOURED, 2, "1 to 16"),
    "presence_penalty": Entry(HONOURED, 0.5),
    "seed": Entry(HONOURED, 7, "the same text, however it is decoded"),
    "stop": Entry(HONOURED, ["END"]),
    "stream": Entry(REFUSED, True, _BATCH_STREAM),
    "stream_options": Entry(NO_EFFECT, {"include_usage": True}, "usage is always there; named in `ignored_fields`"),
    "temperature": Entry(HONOURED, 0.7, "without it the task's, else 0: OpenAI's is 1"),
    "top_p": Entry(HONOURED, 0.9),
    "user": Entry(NO_EFFECT, "u", _ACCOUNT),
}
_CALL: Final = {"function": {"name": "f", "arguments": "{}"}}
_NAMED: Final = {"type": "function", "function": {"name": "f"}}
_SCHEMA: Final = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
_TEXT: Final = {"type": "text", "text": "Hello"}
_IMAGE: Final[dict[str, Any]] = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
_SENT_ON: Final = "an inference server gets it; the own engine needs none of it"


def _messages(role: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [*SAID, {"role": role, "content": "Hello", **fields}]}


def _parts(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [_TEXT, part]}]}


def _past(call: Mapping[str, Any]) -> dict[str, Any]:
    return _messages("assistant", tool_calls=[call])


def _function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def _form(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {**_SCHEMA, **fields}}}


def _choice(**choice: Any) -> dict[str, Any]:
    return {"tools": [CALLED], "tool_choice": choice}


_ALLOWED: Final = _choice(type="allowed_tools", allowed_tools={"mode": "auto", "tools": [_NAMED]})


ENTRIES: Final[Mapping[str, Mapping[str, Entry]]] = {
    "files.create": {
        "file": Entry(HONOURED),
        "purpose": Entry(HONOURED, remark="`batch` alone"),
        "expires_after": Entry(HONOURED),
    },
    "files.create, expires_after": {
        "anchor": Entry(HONOURED, remark="`created_at`"),
        "seconds": Entry(HONOURED, remark="3,600 to 2,592,000"),
    },
    "files.list": {
        "after": Entry(HONOURED),
        "limit": Entry(HONOURED, remark="20 without it: OpenAI's is 10,000"),
        "order": Entry(HONOURED),
        "purpose": Entry(HONOURED, remark="`batch`, `batch_output`; of others there are no files"),
    },
    "batches.create": {
        "completion_window": Entry(HONOURED, remark="`24h`, or another number of hours or days up to `7d`"),
        "endpoint": Entry(HONOURED, remark="`/v1/chat/completions` or `/v1/completions`"),
        "input_file_id": Entry(HONOURED),
        "metadata": Entry(HONOURED, remark="its `task` is the task of lines that name none"),
        "output_expires_after": Entry(HONOURED),
    },
    "batches.create, output_expires_after": {
        "anchor": Entry(HONOURED, remark="`created_at`, of the files"),
        "seconds": Entry(HONOURED, remark="3,600 to 2,592,000"),
    },
    "batches.list": {"after": Entry(HONOURED), "limit": Entry(HONOURED, remark="1 to 100")},
    "chat.completions.create": {
        **_BOTH,
        "audio": Entry(REFUSED, {"voice": "alloy", "format": "wav"}),
        "function_call": Entry(REFUSED, {"name": "f"}, "`tool_choice` in its place"),
        "functions": Entry(REFUSED, [CALLED["function"]], "`tools` in their place"),
        "logprobs": Entry(HONOURED, True),
        "max_completion_tokens": Entry(HONOURED, 8),
        "messages": Entry(HONOURED, SAID, "texts and images; sound and files are refused"),
        "metadata": Entry(NO_EFFECT, {"a": "b"}, _ACCOUNT),
        "modalities": Entry(REFUSED, ["text"]),
        "moderation": Entry(REFUSED, {"model": "m"}),
        "parallel_tool_calls": Entry(HONOURED, False),
        "prediction": Entry(HONOURED, {"type": "content", "content": "Hello"}, "look-up proposes it"),
        "prompt_cache_key": Entry(NO_EFFECT, "k", _CACHE),
        "prompt_cache_options": Entry(NO_EFFECT, {"mode": "implicit"}, _CACHE),
        "prompt_cache_retention": Entry(NO_EFFECT, "24h", _CACHE),
        "reasoning_effort": Entry(HONOURED, "low", "as far as the model's chat template knows it"),
        "response_format": Entry(HONOURED, {"type": "json_object"}),
        "safety_identifier": Entry(NO_EFFECT, "s", _ACCOUNT),
        "service_tier": Entry(NO_EFFECT, "flex", _ACCOUNT),
        "store": Entry(NO_EFFECT, True, _ACCOUNT),
        "tool_choice": Entry(HONOURED, "required"),
        "tools": Entry(HONOURED, [CALLED], "functions; custom tools are refused"),
        "top_logprobs": Entry(HONOURED, 2),
        "verbosity": Entry(REFUSED, "low", "`medium` is the same as leaving it out"),
        "web_search_options": Entry(REFUSED, {}),
    },
    "chat.completions.create, prediction": {
        "content": Entry(HONOURED, remark="a text, or parts of text"),
        "type": Entry(HONOURED, remark="`content`"),
    },
    "chat.completions.create, messages": {
        "audio": Entry(REFUSED, _messages("assistant", audio={"id": "a"})),
        "content": Entry(HONOURED, _messages("user")),
        "function_call": Entry(REFUSED, _messages("assistant", function_call={"name": "f", "arguments": "{}"})),
        "name": Entry(HONOURED, _messages("user", name="ann")),
        "refusal": Entry(REFUSED, _messages("assistant", refusal="No.")),
        "role": Entry(HONOURED, _messages("user")),
        "tool_call_id": Entry(HONOURED, _messages("tool", tool_call_id="c")),
        "tool_calls": Entry(HONOURED, _messages("assistant", tool_calls=[{"id": "c", "type": "function", **_CALL}])),
    },
    "chat.completions.create, content parts": {
        "file": Entry(REFUSED, _parts({"type": "file", "file": {"file_id": "f"}})),
        "image_url": Entry(HONOURED, _parts(_IMAGE), "where a server of its task reads images"),
        "input_audio": Entry(REFUSED, _parts({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
        "prompt_cache_breakpoint": Entry(NO_EFFECT, _parts({**_TEXT, "prompt_cache_breakpoint": {}}), "not named"),
        "refusal": Entry(REFUSED, _parts({"type": "refusal", "refusal": "No."})),
        "text": Entry(HONOURED, _parts(_TEXT)),
        "type": Entry(HONOURED, _parts(_TEXT)),
    },
    "chat.completions.create, role of a message": {
        **{name: Entry(HONOURED, _messages(name)) for name in ("assistant", "developer", "system", "tool", "user")},
        "function": Entry(REFUSED, _messages("function", name="f"), "`tool` in its place"),
    },
    "chat.completions.create, type of a content part": {
        "file": Entry(REFUSED, _parts({"type": "file", "file": {"file_id": "f"}})),
        "image_url": Entry(HONOURED, _parts(_IMAGE)),
        "input_audio": Entry(REFUSED, _parts({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
        "refusal": Entry(REFUSED, _parts({"type": "refusal", "refusal": "No."})),
        "text": Entry(HONOURED, _parts(_TEXT)),
    },
    "chat.completions.create, image_url": {
        "url": Entry(HONOURED, _parts(_IMAGE)),
        "detail": Entry(HONOURED, _parts({**_IMAGE, "image_url": {**_IMAGE["image_url"], "detail": "low"}}), _SENT_ON),
    },
    "chat.completions.create, tool_calls": {
        **{
            name: Entry(HONOURED, _past({"id": "c", "type": "function", **_CALL}))
            for name in ("function", "id", "type")
        },
        "custom": Entry(REFUSED, _past({"id": "c", "type": "custom", "custom": {"name": "f", "input": ""}})),
    },
    "chat.completions.create, function of tool_calls": {
        name: Entry(HONOURED, _past({"id": "c", **_CALL})) for name in ("arguments", "name")
    },
    "chat.completions.create, tools": {
        "custom": Entry(REFUSED, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        **{name: Entry(HONOURED, {"tools": [CALLED]}) for name in ("function", "type")},
    },
    "chat.completions.create, function of tools": {
        "description": Entry(HONOURED, _function(description="Says hello.")),
        "name": Entry(HONOURED, _function()),
        "parameters": Entry(HONOURED, _function(parameters={"type": "object", "properties": {}})),
        "strict": Entry(HONOURED, _function(strict=True), _SENT_ON),
    },
    "chat.completions.create, tool_choice": {
        "allowed_tools": Entry(HONOURED, _ALLOWED),
        "custom": Entry(REFUSED, _choice(type="custom", custom={"name": "f"})),
        "function": Entry(HONOURED, _choice(**_NAMED)),
        "type": Entry(HONOURED, _choice(**_NAMED)),
    },
    "chat.completions.create, function of tool_choice": {"name": Entry(HONOURED, _choice(**_NAMED))},
    "chat.completions.create, allowed_tools": {name: Entry(HONOURED, _ALLOWED) for name in ("mode", "tools")},
    "chat.completions.create, response_format": {
        name: Entry(HONOURED, {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}})
        for name in ("json_schema", "type")
    },
    "chat.completions.create, json_schema": {
        "description": Entry(HONOURED, _form(description="A text."), _SENT_ON),
        "name": Entry(HONOURED, _form(), _SENT_ON),
        "schema": Entry(HONOURED, _form()),
        "strict": Entry(HONOURED, _form(strict=False), "the text matches the schema whatever it is"),
    },
    "chat.completions.create, type of a tool": {
        "custom": Entry(REFUSED, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        "function": Entry(HONOURED, {"tools": [CALLED]}),
    },
    "chat.completions.create, type of tool_choice": {
        "allowed_tools": Entry(HONOURED, _ALLOWED),
        "custom": Entry(REFUSED, _choice(type="custom", custom={"name": "f"})),
        "function": Entry(HONOURED, _choice(**_NAMED)),
    },
    "chat.completions.create, type of response_format": {
        "json_object": Entry(HONOURED, {"response_format": {"type": "json_object"}}),
        "json_schema": Entry(HONOURED, {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}}),
        "text": Entry(HONOURED, {"response_format": {"type": "text"}}),
    },
    "completions.create": {
        **_BOTH,
        "best_of": Entry(REFUSED, 3, "1 is the same as leaving it out"),
        "echo": Entry(REFUSED, True, "`false` is the same as leaving it out"),
        "logprobs": Entry(HONOURED, 3),
        "prompt": Entry(HONOURED, "Once", "a text, or an array of one; token ids are refused"),
        "suffix": Entry(REFUSED, "end", "an empty one is the same as leaving it out"),
    },
}


def fields_of(request: str) -> set[str]:
    """The names that the client's types have, or of a kind the values that tell them apart."""
    if request in KINDS:
        union, tag = KINDS[request]
        kinds = [one for one in get_args(union) if get_origin(one) is not Literal]
        return {name for one in kinds for name in get_args(get_type_hints(one)[tag])}
    return {name for one in TYPES[request] for name in get_type_hints(one)}


def page() -> str:
    """The page of the table."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Fields of OpenAI's client"
    yield ""
    yield "What becomes of every field that OpenAI's client can send to files and batches, and in the body of a chat"
    yield "completion or of a completion in a line of a batch. The names are those of the client's own types, which a"
    yield "test compares. A field that stands nowhere here is refused by its name, but within a message, a part of its"
    yield "content, a call or a prediction, where it is without effect. What else differs from OpenAI's service:"
    yield "[the guide](../guides/openai-batches.md#what-differs-from-openais-service)."
    for request, entries in ENTRIES.items():
        yield ""
        yield f"## {request}"
        yield ""
        yield "| field | what becomes of it | remark |"
        yield "|---|---|---|"
        for name in sorted(entries):
            yield f"| `{name}` | {entries[name].verdict} | {entries[name].remark} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
