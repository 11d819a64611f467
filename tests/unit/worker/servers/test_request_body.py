"""What a job says, in the words of each kind of server."""

from __future__ import annotations

import json
import re
from typing import Any, Final, get_args

import pytest

from alphaloop.messages import Body, Job
from alphaloop.messages.capabilities import refusal_of, served_by
from alphaloop.server_identity import ServerKind
from tests.fixtures.messages import asked_for, settings_of
from worker.servers.request_body import body_of, path_of, tokenize_body_of

KINDS: Final[tuple[ServerKind, ...]] = get_args(ServerKind)
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGES: Final = [{"role": "user", "content": "hi"}]
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
]


def sent(kind: ServerKind, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The request for a job with these fields of its body."""
    if "prompt" not in fields:
        fields = {"messages": MESSAGES, **fields}
    body = Body.model_validate_json(json.dumps(fields))
    job = Job(job_id="job", task="code", body=body)
    return body_of(kind, "model", job, settings_of(body), stream=stream)


def added(kind: ServerKind, **fields: Any) -> dict[str, Any]:
    """What these fields add to the request."""
    usual = sent(kind, **({"prompt": fields["prompt"]} if "prompt" in fields else {}))
    return {name: value for name, value in sent(kind, **fields).items() if usual.get(name) != value}


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_says_nothing_unusual_sends_nothing_unusual(kind: ServerKind) -> None:
    usual = {"model", "messages", "max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty"}
    of_kinds = {"top_k", "min_p", "repetition_penalty", "repeat_penalty", "stop_token_ids"}
    counts = {"return_token_ids", "vllm_xargs", "return_spec_tokens_details"}
    assert sent(kind).keys() <= usual | of_kinds | counts | {"n", "stream"}
    assert sent(kind)["messages"] == MESSAGES


RESPONSE_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
NAMED: Final = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
#: By what the body says, what each kind of server is sent; None: refused.
CONSTRAINTS: Final[dict[str, tuple[dict[str, Any], dict[ServerKind, dict[str, Any] | None]]]] = {
    "response_format": (
        {"response_format": RESPONSE_FORMAT},
        {kind: {"response_format": RESPONSE_FORMAT} for kind in KINDS},
    ),
    "json_object": (
        {"response_format": {"type": "json_object"}},
        {kind: {"response_format": {"type": "json_object"}} for kind in KINDS},
    ),
    "json": (
        {"structured_outputs": {"json": SCHEMA}},
        {kind: {"response_format": NAMED} for kind in KINDS} | {"vllm": {"structured_outputs": {"json": SCHEMA}}},
    ),
    "json of a prompt": (
        {"prompt": "p", "structured_outputs": {"json": SCHEMA}},
        {kind: {"response_format": NAMED} for kind in KINDS}
        | {"vllm": {"structured_outputs": {"json": SCHEMA}}, "llama_cpp": {"json_schema": SCHEMA}, "openai": None},
    ),
    "regex": (
        {"prompt": "p", "structured_outputs": {"regex": "[0-9]+"}},
        {
            "vllm": {"structured_outputs": {"regex": "[0-9]+"}},
            "sglang": {"regex": "[0-9]+"},
            "tensorrt_llm": {"response_format": {"type": "regex", "regex": "[0-9]+"}},
            "llama_cpp": None,
            "openai": None,
        },
    ),
    "grammar": (
        {"structured_outputs": {"grammar": "root ::= [0-9]"}},
        {
            "vllm": {"structured_outputs": {"grammar": "root ::= [0-9]"}},
            "sglang": {"ebnf": "root ::= [0-9]"},
            "tensorrt_llm": {"response_format": {"type": "ebnf", "ebnf": "root ::= [0-9]"}},
            "llama_cpp": {"grammar": "root ::= [0-9]"},
            "openai": None,
        },
    ),
    "choice": (
        {"guided_choice": ["yes", 'n"o\n', "a.b"]},
        {
            "vllm": {"structured_outputs": {"choice": ["yes", 'n"o\n', "a.b"]}},
            "sglang": {"regex": 'yes|n"o\n|a\\.b'},
            "tensorrt_llm": {"response_format": {"type": "regex", "regex": 'yes|n"o\n|a\\.b'}},
            "llama_cpp": {"grammar": 'root ::= "yes" | "n\\x22o\\x0A" | "a.b"'},
            "openai": None,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_is_said_in_the_words_of_each_server_or_refused(name: str, kind: ServerKind) -> None:
    fields, expected = CONSTRAINTS[name]
    if (wanted := expected[kind]) is not None:
        assert added(kind, **fields) == wanted
        return
    body = Body.model_validate_json(json.dumps({"messages": MESSAGES, **fields} if "prompt" not in fields else fields))
    refusal = refusal_of(body, asked_for(body), [served_by(kind)])
    assert refusal is not None
    assert refusal.field is not None
    assert refusal.field.startswith("body.structured_outputs.")


def test_the_expression_of_choices_matches_these_and_no_others() -> None:
    choices = ["a.b", "a|b", "(x)", "[y]{2}", "c*d+e?", "^$", "back\\slash", "dash-slash/", "line\nline", "ä"]
    pattern = added("sglang", structured_outputs={"choice": choices})["regex"]
    assert all(re.fullmatch(pattern, one) for one in choices)
    assert not any(re.fullmatch(pattern, one) for one in ("axb", "a", "b", "x", "yy", "cd", ""))


@pytest.mark.parametrize("kind", KINDS)
def test_tools_go_as_they_were_sent_and_a_choice_as_the_server_knows_it(kind: ServerKind) -> None:
    parallel = {"parallel_tool_calls": True} if kind == "llama_cpp" else {}
    assert added(kind, tools=TOOLS) == {"tools": TOOLS, "tool_choice": "auto", **parallel}
    required = added(kind, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert required == {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "g"}}
    alone = {"tools": TOOLS[1:], "tool_choice": "required"}
    assert added(kind, tools=TOOLS, tool_choice=named) == (
        alone | parallel if kind == "llama_cpp" else {"tools": TOOLS, "tool_choice": named}
    )
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", **NAME_OF_G}]}}
    assert added(kind, tools=TOOLS, tool_choice=some) == (
        {"tools": TOOLS, "tool_choice": some}
        if kind == "openai"
        else {"tools": TOOLS[1:], "tool_choice": "auto", **parallel}
    )


NAME_OF_G: Final = {"function": {"name": "g"}}


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_asked_in_the_form_of_chats_and_of_prompts(kind: ServerKind) -> None:
    least = 1 if kind in ("llama_cpp", "tensorrt_llm") else 0
    assert added(kind, logprobs=True) == {"logprobs": True, "top_logprobs": least}
    assert added(kind, logprobs=True, top_logprobs=5) == {"logprobs": True, "top_logprobs": 5}
    assert added(kind, prompt="p", logprobs=0) == {"logprobs": least}
    assert added(kind, prompt="p", logprobs=3) == {"logprobs": 3}
    assert added(kind, prompt="p", n=2) == {"n": 2} | ({"logprobs": 1} if kind == "llama_cpp" else {})


def test_other_fields_are_sent_under_the_names_of_each_server() -> None:
    fields = {
        "n": 3,
        "min_tokens": 2,
        "ignore_eos": True,
        "bad_words": ["no"],
        "allowed_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 100,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert added("vllm", **fields) == fields
    assert added("sglang", include_stop_str_in_output=True, min_tokens=2) == {"no_stop_trim": True, "min_tokens": 2}
    continued = [*MESSAGES, {"role": "assistant", "content": "so"}]
    request = sent("vllm", messages=continued, continue_final_message=True)
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
    job = Job(job_id="job", task="code", body=Body.model_validate({"messages": MESSAGES, "tools": TOOLS}))
    assert tokenize_body_of("model", job) == {"model": "model", "messages": MESSAGES, "tools": TOOLS}
    assert path_of(job) == "/chat/completions"


def test_a_conversation_with_images_thoughts_and_calls_goes_as_it_is() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "see"}, image]},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    expected = [messages[0], {**messages[1], "content": None}, *messages[2:]]
    assert sent("vllm", messages=messages)["messages"] == expected
    thought = sent("llama_cpp", messages=messages)["messages"][1]
    assert (thought["reasoning_content"], "reasoning" in thought) == ("hm", False)
