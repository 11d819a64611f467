"""The table of what each engine can do with a job, and what a job asks for."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from alphaloop.acceptance import form_bucket
from alphaloop.engine import Sampling
from alphaloop.messages.body import Body
from alphaloop.messages.capabilities import EngineFeatures, Feature, features_of, place_of, refusal_of, served_by
from alphaloop.server_identity import ServerKind
from tests.fixtures.messages import asked_for

TURN: Final = {"role": "user", "content": "x"}
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: Final = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE: Final = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
NAMED: Final = {"type": "function", "function": {"name": "f"}}
ALLOWED: Final = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

#: A body's fields, what they ask for, and where the first of it stands.
ASKED: list[tuple[dict[str, Any], set[str], str]] = [
    ({"top_k": 5}, {"top_k"}, "body.top_k"),
    ({"min_p": 0.1}, {"min_p"}, "body.min_p"),
    ({"repetition_penalty": 1.1}, {"repetition_penalty"}, "body.repetition_penalty"),
    ({"frequency_penalty": 0.1}, {"frequency_penalty"}, "body.frequency_penalty"),
    ({"presence_penalty": 0.1}, {"presence_penalty"}, "body.presence_penalty"),
    ({"logit_bias": {"5": 1.0}}, {"logit_bias"}, "body.logit_bias"),
    ({"stop_token_ids": [5]}, {"stop_token_ids"}, "body.stop_token_ids"),
    ({"min_tokens": 1}, {"min_tokens"}, "body.min_tokens"),
    ({"ignore_eos": True}, {"ignore_eos"}, "body.ignore_eos"),
    ({"bad_words": ["a"]}, {"bad_words"}, "body.bad_words"),
    ({"allowed_token_ids": [5]}, {"allowed_token_ids"}, "body.allowed_token_ids"),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output"}, "body.include_stop_str_in_output"),
    ({"skip_special_tokens": False}, {"skip_special_tokens"}, "body.skip_special_tokens"),
    ({"n": 2}, {"n"}, "body.n"),
    ({"logprobs": True}, {"logprobs"}, "body.logprobs"),
    ({"response_format": {"type": "json_object"}}, {"response_format"}, "body.response_format"),
    ({"response_format": FORMAT}, {"response_format.json_schema"}, "body.response_format.json_schema.schema"),
    ({"structured_outputs": {"json": {}}}, {"response_format.json_schema"}, "body.structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, {"response_format"}, "body.structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a"}}, {"structured_outputs.regex"}, "body.structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}}, {"structured_outputs.choice"}, "body.structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "a"}}, {"structured_outputs.grammar"}, "body.structured_outputs.grammar"),
    (
        {"messages": None, "prompt": "x", "structured_outputs": {"regex": "a"}},
        {"structured_outputs.regex", "a constraint on a prompt"},
        "body.structured_outputs.regex",
    ),
    ({"tools": [TOOL]}, {"tools"}, "body.tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, {"tools"}, "body.tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, {"tools", "tool_choice"}, "body.tools"),
    ({"tools": [TOOL], "tool_choice": NAMED}, {"tools", "tool_choice"}, "body.tools"),
    ({"tools": [TOOL], "tool_choice": ALLOWED}, {"tools", "tool_choice.allowed_tools"}, "body.tools"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, {"tools", "parallel_tool_calls"}, "body.tools"),
    (
        {"tools": [TOOL], "response_format": FORMAT},
        {"tools", "response_format.json_schema", "tools beside a constraint"},
        "body.response_format.json_schema.schema",
    ),
    (
        {"tools": [TOOL], "tool_choice": "none", "response_format": FORMAT},
        {"tools", "response_format.json_schema"},
        "body.response_format.json_schema.schema",
    ),
    (
        {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL]}]},
        {"messages.tool_calls"},
        "body.messages.1.tool_calls",
    ),
    (
        {"messages": [TURN, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
        {"messages.tool_calls"},
        "body.messages.1.tool_call_id",
    ),
    (
        {"messages": [TURN, {"role": "assistant", "content": "x", "reasoning_content": "y"}]},
        {"messages.reasoning"},
        "body.messages.1.reasoning",
    ),
    (
        {"messages": [TURN, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
        {"messages.content.image_url"},
        "body.messages.1.content.1.type",
    ),
    ({"reasoning_effort": "low"}, {"reasoning_effort"}, "body.reasoning_effort"),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs"}, "body.chat_template_kwargs"),
    (
        {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
        {"continue_final_message"},
        "body.continue_final_message",
    ),
    ({"add_generation_prompt": False}, {"add_generation_prompt"}, "body.add_generation_prompt"),
    ({"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens"}, "body.truncate_prompt_tokens"),
]
#: What every engine does, or what says nothing.
NEUTRAL: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.5, "seed": 3, "stop": ["a"], "max_tokens": 5, "stream": True},
    {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    {"top_k": -1, "logit_bias": {}, "stop_token_ids": [], "n": 1, "logprobs": False, "top_logprobs": 0},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "response_format": {"type": "text"}},
    {"structured_outputs": {}, "chat_template_kwargs": {}, "bad_words": [], "min_tokens": 0, "ignore_eos": False},
    {"structured_outputs": {"json": None, "json_object": False}, "skip_special_tokens": True},
    {"add_generation_prompt": True, "continue_final_message": False, "include_stop_str_in_output": False},
    {"messages": [{"role": "tool", "content": [{"type": "text", "text": "x"}], "name": "f"}]},
]


def body_of(fields: dict[str, Any]) -> Body:
    return Body.model_validate({"messages": [TURN], **fields})


@pytest.mark.parametrize(("fields", "asked", "place"), ASKED)
def test_what_a_body_asks_for(fields: dict[str, Any], asked: set[str], place: str) -> None:
    body = body_of(fields)
    found = asked_for(body)
    assert found == asked
    nothing = EngineFeatures("nobody", frozenset())
    refusal = refusal_of(body, found, [nothing])
    assert refusal is not None
    assert refusal.field == place
    for one in found:
        assert place_of(body, one).startswith("body.")
        assert refusal_of(body, found, [nothing, EngineFeatures("all", frozenset(Feature)), nothing]) is None


def test_every_feature_is_asked_for_by_some_field() -> None:
    assert set().union(*(asked for _, asked, _ in ASKED)) == set(Feature)


@pytest.mark.parametrize("fields", NEUTRAL)
def test_what_changes_nothing_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert asked_for(body_of(fields)) == frozenset()


def test_settings_of_the_task_count_where_the_body_has_none_and_the_workers_are_the_last_word() -> None:
    settings = Sampling(5, 1.0, top_k=5, min_p=0.1, repetition_penalty=1.1)
    assert features_of(body_of({}), settings) == {"top_k", "min_p", "repetition_penalty"}
    assert features_of(body_of({"top_k": 5}), Sampling(5, 1.0)) == frozenset()


@pytest.mark.parametrize(
    ("kind", "drafts", "fields", "field", "able"),
    [
        ("openai", False, {"top_k": 5}, "body.top_k", "vLLM"),
        ("openai", False, {"min_p": 0.1}, "body.min_p", "llama.cpp"),
        ("openai", False, {"repetition_penalty": 1.2}, "body.repetition_penalty", "SGLang"),
        ("openai", False, {"stop_token_ids": [3]}, "body.stop_token_ids", "TensorRT-LLM"),
        ("llama_cpp", False, {"stop_token_ids": [3]}, "body.stop_token_ids", "the own engine"),
        ("llama_cpp", False, {"frequency_penalty": 0.5}, "body.frequency_penalty", "OpenAI's form"),
        ("llama_cpp", False, {"presence_penalty": 0.5}, "body.presence_penalty", "vLLM"),
        ("vllm", True, {"min_p": 0.1}, "body.min_p", "vLLM"),
        ("vllm", True, {"logit_bias": {"5": 1.0}}, "body.logit_bias", "SGLang"),
    ],
)
def test_a_setting_that_a_server_lacks_is_refused_with_who_could(
    kind: ServerKind, drafts: bool, fields: dict[str, Any], field: str, able: str
) -> None:
    body = body_of(fields)
    refusal = refusal_of(body, asked_for(body), [served_by(kind, drafts=drafts)])
    assert refusal is not None
    assert refusal.field == field
    assert able in (refusal.hint or "")
    assert ("with drafts" in refusal.message) == drafts


def test_the_engine_that_lacks_least_says_what_is_missing() -> None:
    body = body_of({"top_k": 5, "n": 2, "min_tokens": 3})
    few = EngineFeatures("few", frozenset({Feature.N}))
    many = EngineFeatures("many", frozenset({Feature.TOP_K, Feature.N}))
    for among in itertools.permutations([few, many]):
        refusal = refusal_of(body, asked_for(body), among)
        assert refusal is not None
        assert (refusal.field, refusal.message.split()[0]) == ("body.min_tokens", "many")


def test_what_forms_share_a_history() -> None:
    kinds = ("json_schema", "json_object", "tools", "regex", "choice", "grammar")
    assert [form_bucket(kind) for kind in kinds] == ["json", "json", "json", "regex", "choice", "grammar"]
    assert form_bucket(None) == ""
    assert form_bucket(None, has_tools=True, has_images=True) == "tools,images"
    assert form_bucket("tools", has_tools=True) == "json,tools"
