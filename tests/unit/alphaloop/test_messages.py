"""Messages, also drawn by chance, become jobs or errors that name the field; no error quotes a prompt."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from alphaloop.errors import InvalidField, MalformedMessage, MessageError
from alphaloop.messages import (
    ChatMessage,
    Decoding,
    Job,
    Origin,
    Purpose,
    dead_letter,
    derived_job_id,
    encode_job,
    parse_job,
    payload_digest,
    with_prompt,
)
from alphaloop.messages.headers import encoded, encoded_result_headers, result_headers
from alphaloop.messages.job import refuse_unknown
from tests.fixtures.messages import ORIGIN, SECRET_PROMPT, job_validator, read


def test_the_smallest_job_is_a_chat_of_one_user_message() -> None:
    job = read({"task": "code", "prompt": "def f():"})
    assert job.body.messages == (ChatMessage(role="user", content="def f():"),)
    assert job.body.prompt is None
    assert (job.task, job.decoding, job.purpose) == ("code", Decoding.AUTO, Purpose.TRAFFIC)
    assert job.job_id == derived_job_id(ORIGIN, b'{"task": "code", "prompt": "def f():"}')


def test_fields_of_data_sets_and_of_clients_are_dropped() -> None:
    job = read({"prompt": "x", "user": "u", "nested": {"a": [1]}, "source": "s", "task_id": 3, "prompts": ["y"]})
    assert job.body.messages is not None
    assert job.ignored_fields == ("nested", "prompts", "source", "task_id", "user")
    inside = read({"body": {"prompt": "x", "store": True, "user": "u", "tempreature": None}, "a text": 1, "colour": 2})
    assert (inside.body.prompt, inside.ignored_fields) == ("x", ("body.store", "body.user", "colour"))
    assert parse_job(encode_job(inside), ORIGIN, task="code") == inside, "they stay known where it is written again"
    assert payload_digest(inside) == payload_digest(read({"body": {"prompt": "x"}})), "it is the same job"
    assert len(read({"prompt": "x", **{f"column_{n}": n for n in range(1000)}}).ignored_fields) == 64
    assert isinstance(read({"prompt": "x", "prediction": "a column"}).body.prediction, type(None))


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        (
            {"body": {"prompt": "x", "tempreature": 0.2}},
            "body.tempreature",
            "expected temperature, found 'tempreature'",
        ),
        ({"prompt": "x", "tempreature": 0.2}, "tempreature", "expected temperature, found 'tempreature'"),
        ({"prompt": "x", "max_token": 9}, "max_token", "expected max_tokens"),
        ({"prompt": "x", "topP": 0.9}, "topP", "expected top_p"),
        ({"body": {"prompt": "x", "reasoning": "high"}}, "body.reasoning", "expected a field of a job"),
        ({"body": {"prompt": "x", "a secret text": 1}}, "body", "found a name of other characters"),
    ],
)
def test_a_field_that_does_not_exist_is_refused_with_the_nearest_name(
    fields: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(InvalidField) as refusal:
        read(fields)
    assert refusal.value.field == field
    assert said in refusal.value.message
    assert "secret" not in str(refusal.value)
    assert "worker.ignored_body_fields" in (refusal.value.hint or "")


def test_a_setting_lists_the_unknown_fields_that_are_dropped() -> None:
    value = b'{"body": {"prompt": "x", "reasoning": "high"}}'
    parse_job(value, Origin("c", "jobs.code", 0, 0), task="code", ignored={"reasoning"})


@pytest.mark.parametrize("name", sorted(Job.model_fields))
def test_no_field_of_a_job_is_taken_for_a_misspelt_one(name: str) -> None:
    # Known names are not compared, so this holds for all others too.
    refuse_unknown({"prompt": "x", name: 1, "column": 2}, ())


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": None, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
        ({"max_tokens": None}, None),
    ],
)
def test_both_names_of_the_token_limit_count(body: dict[str, Any], limit: int | None) -> None:
    assert read({"prompt": "x", **body}).body.max_tokens == limit
    assert read({"body": {"prompt": "x", **body}}).body.max_tokens == limit


def test_the_last_allowed_sampling_settings_are_taken_as_they_are() -> None:
    sampling = {
        "top_k": -1,
        "min_p": 1,
        "repetition_penalty": 1.3,
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "logit_bias": {str(token): -100 for token in range(1024)},
        "stop_token_ids": list(range(64)),
    }
    found = read({"prompt": "x", **sampling}).body.model_dump()
    assert {name: found[name] for name in sampling} == sampling | {"stop_token_ids": tuple(range(64))}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
#: What is wrong by the schema too, and what only the reader can tell.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"body": {"prompt": "x", "prediction": "y"}}, "body.prediction"),
    ({"body": {"prompt": "x", "prediction": {"type": "content"}}}, "body.prediction.content"),
    ({"body": {"prompt": "x", "prediction": {"type": "text", "content": "y"}}}, "body.prediction.type"),
    ({"body": {"prompt": "x", "prediction": {"type": "content", "content": 7}}}, "body.prediction.content"),
    ({"body": {"prompt": "x", "prediction": {"type": "content", "content": []}}}, "body.prediction.content"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["x", "y"]}, "prompt"),
    ({"body": {"prompt": [5]}}, "body.prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"body": {}}, "body.prompt"),
    ({"body": []}, "body"),
    ({"body": {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}}, "body.prompt"),
    ({"body": {"messages": []}}, "body.messages"),
    ({"body": {"messages": {"role": "user", "content": "x"}}}, "body.messages"),
    (
        {"body": {"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]}},
        "body.messages.1.role",
    ),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"prompt": "x", "temperature": "1"}, "temperature"),
    ({"prompt": "x", "temperature": 2.1}, "temperature"),
    ({"prompt": "x", "temperature": True}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 5.5}, "max_tokens"),
    ({"prompt": "x", "n": 17}, "n"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt": "x", "reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "x", "response_format": "json"}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"prompt": "x", "response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
    (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    ({"prompt": "x", "structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"prompt": "x", "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"prompt": "x", "structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice.1"),
    ({"prompt": "x", "tools": {}}, "tools"),
    ({"prompt": "x", "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
    ({"prompt": "x", "tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    ({"prompt": "x", "tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    (
        {"prompt": "x", "tools": [TOOL, {**TOOL, "function": {"name": "g", "parameters": 1}}]},
        "tools.1.function.parameters",
    ),
    (
        {
            "prompt": "x",
            "tools": [TOOL, {**TOOL, "function": {"name": "g", "parameters": {"type": ["array", "null"]}}}],
        },
        "tools.1.function.parameters.type",
    ),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"prompt": "x", "tools": [TOOL] * 129}, "tools"),
    ({"prompt": "x", "guided_choice": ["a", ""]}, "guided_choice.1"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"prompt": "x", "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"prompt": "x", "bad_words": [""]}, "bad_words.0"),
    ({"prompt": "x", "bad_words": ["a"] * 257}, "bad_words"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": [-1]}, "allowed_token_ids.0"),
    ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt": "x", "chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a"}}]}]},
        "messages.0.content.0.image_url.url",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls.0.function"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "stop": ["a"] * 5}, "stop"),
    ({"prompt": "x", "stop": [""]}, "stop.0"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "stream": 1}, "stream"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 1.1}, "min_p"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "frequency_penalty": 2.1}, "frequency_penalty"),
    ({"prompt": "x", "presence_penalty": -2.1}, "presence_penalty"),
    ({"prompt": "x", "logit_bias": [[5, 1.0]]}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 100.5}}, "logit_bias.5"),
    ({"prompt": "x", "logit_bias": {"5": True}}, "logit_bias.5"),
    ({"prompt": "x", "stop_token_ids": 5}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"prompt": "x", "stop_token_ids": [3, True]}, "stop_token_ids.1"),
    ({"prompt": "x", "stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"prompt": "x", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
    ({"prompt": "x", "skip_special_tokens": 0}, "skip_special_tokens"),
    ({"prompt": "x", "decoding": "fast"}, "decoding"),
    ({"prompt": "x", "purpose": 5}, "purpose"),
    ({"prompt": "x", "priority": True}, "priority"),
    ({"prompt": "x", "deadline": 60}, "deadline"),
    ({"prompt": "x", "job_id": "two words"}, "job_id"),
    ({"prompt": "x", "job_id": "x" * 201}, "job_id"),
    ({"prompt": "x", "custom_id": "a\x00b"}, "custom_id"),
    ({"prompt": "x", "segment": ""}, "segment"),
    ({"prompt": "x", "task": 5}, "task"),
    ({"prompt": "x", "probe_num_draft_tokens": 0}, "probe_num_draft_tokens"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"body": {"prompt": "x"}, "prompt": "x"}, "prompt"),
    ({"body": {"prompt": "x", "n": 17}}, "body.n"),
    ({"body": {"prompt": "x", "structured_outputs": {"json": 5}}}, "body.structured_outputs.json"),
    ({"messages": []}, "messages"),
    ({"prompt": "x", "priority": 101}, "priority"),
]
WRONG_BEYOND_THE_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"prompt": " \n\t"}, "prompt"),
    ({"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"prompt": "x", "logit_bias": {"the": 1.0}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"05": 1.0}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"-1": 1.0}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt": "x", "deadline": "60"}, "deadline"),
    ({"prompt": "x", "deadline": "2026-01-31T09:00:00"}, "deadline"),
    ({"prompt": "x", "job_id": "line\n"}, "job_id"),
    ({"prompt": "x", "task": "sql"}, "task"),
    ({"prompt": "x", "min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"prompt": "x", "min_tokens": 3, "allowed_token_ids": [1, 2], "stop_token_ids": [2, 1]}, "min_tokens"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "x", "logprobs": 3}, "logprobs"),
    ({"body": {"prompt": "x", "logprobs": True}}, "body.logprobs"),
    ({"prompt": "x", "top_logprobs": 3}, "top_logprobs"),
    ({"body": {"prompt": "x", "logprobs": 3, "top_logprobs": 3}}, "body.top_logprobs"),
    ({"body": {"prompt": "x", "tools": [TOOL]}}, "body.tools"),
    ({"body": {"prompt": "x", "reasoning_effort": "low"}}, "body.reasoning_effort"),
    ({"prompt": "x", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"prompt": "x", "chat_template_kwargs": {"two words": 1}}, "chat_template_kwargs"),
    ({"prompt": "x", "chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
    ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [{"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    ({"prompt": "x", "tool_choice": "required"}, "tool_choice"),
    ({"prompt": "x", "tools": [TOOL, TOOL]}, "tools.1.function.name"),
    (
        {"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"prompt": "x", "structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    (
        {"prompt": "x", "structured_outputs": {"disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"prompt": "x", "structured_outputs": {"two words": 1}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"prompt": "x", "guided_json": "5"}, "guided_json"),
    ({"prompt": "x", "guided_json": '{"a":' * 25 + "1" + "}" * 25}, "guided_json"),
    ({"prompt": "x", "guided_json": '{"a": "' + "x" * (1 << 18) + '"}'}, "guided_json"),
    ({"prompt": "x", "guided_json": {"a": "x" * (1 << 18)}}, "guided_json"),
    ({"prompt": "x", "guided_grammar": "x" * (1 + (1 << 18))}, "guided_grammar"),
    ({"prompt": "x", "tools": [{**TOOL, "more": "x" * (1 << 18)}]}, "tools"),
    ({"prompt": "x", "guided_choice": ["a"], "guided_regex": "a"}, "guided_regex"),
    ({"prompt": "x", "response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"prompt": "x", "guided_choice": ["yes.", "no."], "stop": "."}, "stop"),
    ({"prompt": "x", "guided_choice": ["yes.", "no."], "bad_words": ["x", "."]}, "bad_words.1"),
    ({"prompt": "x", "guided_choice": ["yes", "no"], "min_tokens": 4}, "min_tokens"),
    ({"prompt": "x", "response_format": {"type": "json_object"}, "stop": ["\n", "}"]}, "stop.1"),
    ({"prompt": "x", "guided_json": {"type": "object"}, "ignore_eos": True}, "ignore_eos"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages.0.reasoning"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages.0.reasoning_content"),
    ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "messages.0.function_call"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": [IMAGE] * 65}]}, "messages.0.content"),
]


@pytest.mark.parametrize(("message", "field"), [*WRONG, *WRONG_BEYOND_THE_SCHEMA])
def test_a_wrong_field_is_refused_with_its_path(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(message)
    assert caught.value.field == field
    assert not re.search(r"tuple|dictionary|should|permitted|a valid|instance", str(caught.value).lower())
    assert job_validator().is_valid(message) == ((message, field) in WRONG_BEYOND_THE_SCHEMA)


@pytest.mark.parametrize("field", ["prompt", "custom_id", "job_id", "task", "segment"])
def test_text_that_utf8_cannot_carry_is_refused(field: str) -> None:
    fields = {"prompt": "x", field: "SURROGATE"}
    with pytest.raises(InvalidField):
        read(json.dumps(fields).replace("SURROGATE", r"\ud800").encode())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "empty message"),
        (b"", "empty message"),
        (b"{", "character"),
        (b'{"prompt": "x",}', "character"),
        (b"null", "found null"),
        (b'["prompt"]', "found an array of 1"),
        (b'"prompt"', "a string of 6 characters"),
        (b'{"prompt": "\xff"}', "0xff at 12"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "BOM"),
        (b'{"prompt": "x", "top_p": NaN}', "NaN"),
        (b'{"prompt": "x", "top_p": Infinity}', "Infinity"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "numbers of at most 4300 digits"),
        (b"[" * 200_000, "nesting"),
        (b'{"a":' * 200_000, "nesting"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "found more"),
    ],
)
def test_what_is_not_a_json_object_is_malformed(value: bytes | None, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said) as caught:
        parse_job(value, ORIGIN, task="code", max_bytes=2 << 20)
    assert caught.value.field is None


def test_the_limits_are_the_last_allowed_values() -> None:
    value = b'{"prompt": "x", "deep": ' + b"[" * 31 + b"]" * 31 + b"}"
    assert read(value, max_bytes=len(value)).task == "code"
    with pytest.raises(MalformedMessage, match=f"at most {len(value) - 1} bytes, found {len(value)}"):
        read(value, max_bytes=len(value) - 1)
    with pytest.raises(MalformedMessage, match="at most 32 levels of nesting, found more"):
        read(value.replace(b"[]", b"[[]]"))


@pytest.mark.parametrize(
    "message",
    [
        {"body": {"prompt": 5, "messages": SECRET_PROMPT}},
        {"prompt": SECRET_PROMPT, "temperature": SECRET_PROMPT},
        {"messages": [{"role": SECRET_PROMPT, "content": SECRET_PROMPT}]},
        {"prompt": SECRET_PROMPT, "stop": [SECRET_PROMPT * 20]},
        {"prompt": SECRET_PROMPT, "n": 30},
        {"prompt": "x", "structured_outputs": {SECRET_PROMPT: 1}},
        {"prompt": "x", "structured_outputs": {"choice": [SECRET_PROMPT, 5]}},
        {"prompt": "x", "guided_json": SECRET_PROMPT},
        {"prompt": "x", "guided_choice": [SECRET_PROMPT], "stop": SECRET_PROMPT},
        {"prompt": "x", "response_format": {"type": SECRET_PROMPT}},
        {"prompt": "x", "response_format": {"type": "json_object", SECRET_PROMPT: 1}},
        {"prompt": "x", "tools": [{"type": SECRET_PROMPT}]},
        {"prompt": "x", "tools": [{"type": "function", "function": {"name": SECRET_PROMPT + " ."}}]},
        {"prompt": "x", "tools": [TOOL], "tool_choice": SECRET_PROMPT},
        {"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": SECRET_PROMPT}}},
        {"prompt": "x", "chat_template_kwargs": {SECRET_PROMPT: 1}},
        {"prompt": "x", "reasoning_effort": SECRET_PROMPT},
        {"messages": [{"role": "user", "content": [{"type": SECRET_PROMPT}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET_PROMPT}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", SECRET_PROMPT: 1, "type": SECRET_PROMPT}]}]},
        {"prompt": SECRET_PROMPT, "logit_bias": {SECRET_PROMPT: 3}},
        {"prompt": SECRET_PROMPT, "logit_bias": {"7": SECRET_PROMPT}},
    ],
)
def test_a_refusal_never_quotes_the_prompt(message: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as caught:
        read(message)
    assert SECRET_PROMPT not in str(caught.value)
    letter = dead_letter(
        caught.value, ORIGIN, group="g", num_deliveries=1, key=None, value=json.dumps(message).encode(), headers=()
    )
    assert all(SECRET_PROMPT.encode() not in content for _, content in letter.headers)


def test_a_deadline_passes_at_its_instant() -> None:
    job = read({"prompt": "x", "deadline": "2026-01-31T10:00:00+01:00"})
    assert not job.is_expired(datetime(2026, 1, 31, 8, 59, 59, tzinfo=UTC))
    assert job.is_expired(datetime(2026, 1, 31, 9, tzinfo=UTC))
    assert not read({"prompt": "x"}).is_expired(datetime.max.replace(tzinfo=UTC))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(), child, max_size=4),
    max_leaves=12,
)


@given(JSON, st.booleans())
def test_what_the_fast_parser_takes_the_other_reads_alike(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    with contextlib.suppress(ValueError):
        assert repr(from_json(text, allow_inf_nan=False)) == repr(json.loads(text))


@pytest.mark.parametrize("carried", [{}, {"traceparent": "00-1", "ce_causationid": "é"}])
def test_a_result_is_sent_with_its_headers(carried: dict[str, str]) -> None:
    sent = encoded_result_headers(b"job-1", carried)
    assert sorted(sent) == sorted(encoded(result_headers("job-1", carried)))


ELSEWHERE = {"url": "s3://b/a", "sha256": "0" * 64, "num_bytes": 5}


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ({"tools": [TOOL], "n": 2, "logprobs": True}, {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ({"guided_json": '{"type": "object"}', "logprobs": 0}, {"prompt": "x"}),
        ({"continue_final_message": True}, {"messages": [{"role": "assistant", "content": "x"}]}),
    ],
)
def test_what_a_body_asks_of_a_prompt_elsewhere_is_asked_of_that_prompt(
    body: dict[str, Any], content: dict[str, Any]
) -> None:
    job = read({"body_ref": ELSEWHERE, "body": body})
    whole = with_prompt(job, json.dumps(content).encode())
    assert whole.body == read({"body": {**body, **content}}).body
    assert payload_digest(whole) == payload_digest(job)


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ({"tools": [TOOL]}, {"prompt": "x"}),
        ({"logprobs": 3}, {"messages": [{"role": "user", "content": "x"}]}),
        ({"continue_final_message": True}, {"messages": [{"role": "user", "content": "x"}]}),
        ({}, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ],
)
def test_a_prompt_elsewhere_that_contradicts_its_body_is_refused(body: dict[str, Any], content: dict[str, Any]) -> None:
    job = read({"body_ref": ELSEWHERE, "body": body})
    with pytest.raises(InvalidField) as refused:
        with_prompt(job, json.dumps(content).encode())
    assert refused.value.field == "body_ref"
