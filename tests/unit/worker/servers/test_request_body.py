"""What a job says, in the words of each kind of server."""

from __future__ import annotations

import json
import re
from typing import Any, Final, get_args

import pytest

from alphaloop.engine import Sampling
from alphaloop.messages import Body, Job, Purpose
from alphaloop.messages.capabilities import refusal_of, served_by
from alphaloop.server_identity import ServerKind
from tests.fixtures.messages import asked_for, settings_of
from tests.fixtures.models import make_job
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


#: What OpenAI defines is sent to all, as its default where the job says nothing.
USUAL: Final = {
    "model": "model",
    "messages": MESSAGES,
    "max_tokens": 1_000_000,
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "n": 1,
    "stream": False,
}
CUT: Final = {"top_p": 0.9, "top_k": 11, "min_p": 0.05, "seed": 3, "stop": ["END"], "logit_bias": {"5": -2.0}}
XARGS: Final = {"vllm_xargs": {"alphaloop_task": "code"}}
#: What each kind of server gets beside it, for a job that says nothing, and with CUT and a penalty of 1.1.
ADDED: Final[dict[ServerKind, tuple[dict[str, Any], dict[str, Any]]]] = {
    "vllm": (
        {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [], "return_token_ids": True, **XARGS},
        {"repetition_penalty": 1.1},
    ),
    "sglang": (
        {
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [],
            "return_spec_tokens_details": True,
        },
        {"repetition_penalty": 1.1},
    ),
    # Of no use without a penalty, and newer builds take no -1.
    "llama_cpp": ({"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}, {"repeat_penalty": 1.1, "repeat_last_n": 1 << 20}),
    "tensorrt_llm": ({}, {"repetition_penalty": 1.1}),
    "openai": ({}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_default_of_a_server_applies_and_every_setting_is_passed_on(kind: ServerKind) -> None:
    usual, cut = ADDED[kind]
    assert sent(kind) == USUAL | usual
    assert sent(kind, stream=True) == USUAL | usual | {"stream": True, "stream_options": {"include_usage": True}}
    sampling = Sampling(
        max_tokens=1_000_000,
        temperature=1.0,
        top_p=0.9,
        top_k=11,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=3,
        stop=("END",),
        logit_bias=((5, -2.0),),
    )
    of_openai = {name: value for name, value in CUT.items() if kind != "openai" or name not in ("top_k", "min_p")}
    body = body_of(kind, "model", make_job("p"), sampling, stream=False)
    expected = {**USUAL, **usual, **of_openai, **cut, "prompt": "p"}
    del expected["messages"]
    assert body == expected


@pytest.mark.parametrize(("kind", "expected"), [("vllm", -7), ("sglang", 7), ("llama_cpp", None), ("openai", None)])
def test_a_priority_is_sent_to_servers_that_order_requests_by_it(kind: ServerKind, expected: int | None) -> None:
    """For vLLM the lower value goes first."""
    job = make_job("hi").model_copy(update={"priority": 7})
    assert body_of(kind, "model", job, settings_of(job.body), stream=False).get("priority") == expected
    assert "priority" not in sent(kind), "0 is every server's own default"


def test_the_task_of_traffic_is_sent_and_not_that_of_jobs_that_repeat_prompts() -> None:
    probe = make_job("p").model_copy(update={"purpose": Purpose.PROBE})
    assert "vllm_xargs" not in body_of("vllm", "model", probe, Sampling(max_tokens=7, temperature=0.0), stream=False)


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
