"""A refusal names the field as its sender wrote it, so that `dlq redrive --set` takes the name; null is left out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import InvalidField, MessageError
from alphaloop.job_lines import JobReader
from alphaloop.kafka.offsets import Record
from alphaloop.letters.reading import Letter
from alphaloop.letters.redriving import redriven
from alphaloop.messages import Body, Job, dead_letter, payload_digest
from alphaloop.messages.answer_form import GUIDED
from alphaloop.messages.body import UNSUPPORTED
from alphaloop.settings import Settings
from tests.fixtures.messages import ORIGIN, job_validator, read
from worker.intake.control import parse_cancellation

#: Of fields of the body: what is wrong, and what is right.
IN_BODY: Mapping[str, tuple[list[Any], Any]] = {
    "temperature": (["1", 9, True, [1], {"a": 1}], 0.5),
    "top_p": ([0, 7], 0.5),
    "max_tokens": ([0, "many", 1.5], 5),
    "max_completion_tokens": ([0, "many"], None),  # beside max_tokens only its value or null is right
    "seed": ([2**63, "x"], 1),
    "stop": ([5, [1], ["a", ""], [""], ["a"] * 5, ""], "z"),  # of no choice
    "stop_token_ids": ([5, [-1, -2], [1, True]], [3]),
    "logit_bias": ([{"5": 101}, {"5": 101, "6": True}, {"x": 1}, 7], {"5": 1.0}),
    "stream": ([1, "yes"], True),
    "n": ([17, "x"], 1),
    "best_of": ([2], 1),
    "logprobs": ([-1, "x"], None),
    "min_tokens": ([-1, 2_000_000], 0),
    "bad_words": ([5, [1], [""]], ["z"]),
    "allowed_token_ids": ([[], [-1], 5], [3]),
    "reasoning_effort": (["x", 5], None),
    "response_format": ([{"type": "json"}, 5, {"type": "json_schema"}, {"type": "json_object", "schema": 5}], None),
    "structured_outputs": ([{"json": "{"}, {"choice": []}, {"regex": 5}, 5], None),
    "guided_json": (["{", 5], None),
    "guided_choice": ([5, [""], [1, 2]], None),
    "tools": ([5, [5], ["x"], [{"type": "function", "function": {}}]], None),
    "tool_choice": (["required", 5, ["x"]], None),
    "chat_template_kwargs": ([5, {"tools": 1}, {"a b": 1}], None),
    "tempreature": ([1, "x"], None),
    "model": ([5, "x" * 201], None),
    "top_k": ([-2, "x", 1.5], 1),
    "min_p": ([2, "x"], 0.1),
    "repetition_penalty": ([0, "x"], 1.0),
    "frequency_penalty": ([9], 1.0),
    "presence_penalty": (["x"], 1.0),
    "parallel_tool_calls": ([5, "x"], None),
    "top_logprobs": ([99, "x", True], None),
    "ignore_eos": ([5], False),
    "include_stop_str_in_output": (["x"], False),
    "skip_special_tokens": ([1], True),
    "continue_final_message": ([5], False),
    "add_generation_prompt": ([5], True),
    "truncate_prompt_tokens": ([-2, "x", 0], 3),
    "guided_regex": ([5, ""], None),
    "guided_grammar": ([5, ""], None),
    "verbosity": (["high"], None),
    "suffix": (["x"], None),
    "echo": ([True], None),
    "functions": ([[1]], None),
    "prediction": ([5, "x"], {"type": "content", "content": "y"}),
}
OF_A_JOB: Mapping[str, tuple[list[Any], Any]] = {
    "priority": ([1000, "x"], 1),
    "deadline": (["60", 5], "2026-01-31T09:00:00Z"),
    "decoding": (["fast", 5], "auto"),
    "custom_id": (["a\nb", 5, ""], "a"),
    "segment": ([""], "gold"),
    "task": (["sql"], "code"),
    "scored_drafters": ([5, [1], [""]], ["d"]),
}
#: What is right in place of one item.
ITEMS = {
    "stop": "z",
    "stop_token_ids": 3,
    "logit_bias": 1.0,
    "scored_drafters": "d",
    "content": {"type": "text", "text": "y"},
    "bad_words": "z",
    "allowed_token_ids": 3,
    "guided_choice": "x",
    "tools": {"type": "function", "function": {"name": "f"}},
}
#: Of fields that only stand inside others.
INSIDE: dict[str, Any] = {
    "image_url": {"url": "https://example.org/a.png"},
    "json_schema": {"name": "a", "schema": {}},
    "schema": {},
    "function": {"name": "f"},
    "name": "f",
}
TURN = {"role": "user", "content": "x"}
PROMPTS: list[tuple[dict[str, Any], Any]] = [
    ({"prompt": "x"}, "y"),
    ({"prompt": 5}, "y"),
    ({"prompt": " "}, "y"),
    ({"messages": [TURN]}, "y"),
    ({"messages": [TURN, {"role": "robot", "content": "x"}]}, "user"),
    ({"messages": [TURN, {"role": "user"}]}, "y"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "y"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}, "y"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "y"),
    ({"messages": "x"}, [TURN]),
    ({"messages": []}, [TURN]),
    ({"messages": [{"role": "user", "content": " "}]}, [TURN]),
    ({"messages": [TURN], "prompt": "x"}, None),
    ({}, "y"),
]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job, and a right value for each of its fields by name."""
    prompt, right = draw(st.sampled_from(PROMPTS))
    body, job = dict(prompt), dict[str, Any]()
    values = {"prompt": right, "messages": right, "role": "user", "content": "y", "text": "y", "type": "text"}
    values |= INSIDE
    for names, fields in ((IN_BODY, body), (OF_A_JOB, job)):
        for name in draw(st.lists(st.sampled_from(sorted(names)), max_size=2, unique=True)):
            given, values[name] = names[name]
            fields[name] = draw(st.sampled_from(given))
    if draw(st.booleans()):
        return {**job, **body}, values
    beside = draw(st.sampled_from([{}, {}, {"temperature": 1}]))
    return {**job, "body": body, **beside}, values | ({"temperature": None} if beside else {})


def letter_of(fields: Mapping[str, Any], error: MessageError) -> Letter:
    value = json.dumps(fields).encode()
    letter = dead_letter(error, ORIGIN, group="g", num_deliveries=1, key=None, value=value, headers=())
    return Letter(Record(letter.topic, 0, 0, letter.key, letter.value, tuple(letter.headers), None))


def test_every_field_of_the_body_is_tried() -> None:
    assert {*Body.model_fields, *GUIDED} - {"messages", "prompt", *IN_BODY} == set()


@given(jobs())
def test_setting_the_fields_that_are_named_makes_a_job(drawn: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fields, right = drawn
    corrections: dict[str, Any] = {}
    while (error := refusal_of(fields, corrections)) is not None:
        assert error.field not in corrections, "it has a right value now"
        assert_has_a_place(error, fields)
        *_, last = error.field.split(".")
        name = [part for part in error.field.split(".") if not part.isdigit()][-1]
        corrections[error.field] = ITEMS[name] if last.isdigit() else right.get(name)


def refusal_of(fields: dict[str, Any], corrections: dict[str, Any]) -> MessageError | None:
    """Why the message is refused; with corrections, when it is sent again."""
    try:
        if corrections:
            redriven(letter_of(fields, InvalidField("wrong")), corrections, Settings())
        else:
            read(json.dumps(fields).encode())
    except MessageError as error:
        return error
    return None


def assert_has_a_place(error: MessageError, fields: Any) -> None:
    """The path is in what was sent, or its last part is what is missing there."""
    *parents, last = error.field.split(".")
    for part in parents:
        fields = fields[int(part)] if isinstance(fields, list) else fields[part]
    is_there = int(last) < len(fields) if isinstance(fields, list) else fields.get(last) is not None
    assert is_there or "found nothing" in error.message or "found neither" in error.message


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ({"prompt": "x", "temperature": 9}, None),
        ({"prompt": "x", "temperature": 9, "top_p": 7}, "1 more field is wrong too"),
        ({"prompt": "x", "temperature": 9, "top_p": 7, "priority": "x"}, "2 more fields are wrong too"),
        ({"prompt": "x", "stop": [1, 2]}, None),
        ({"prompt": "x", "stop": [1, 2], "seed": "x"}, "1 more field is wrong too"),
        ({"prompt": "x", "logit_bias": {"1": 900, "2": 900}}, None),
        ({"messages": [{"role": "user", "content": 5}]}, None),
        ({"messages": [{}]}, None),
    ],
)
def test_as_many_more_fields_are_wrong_as_are_said_to_be(message: dict[str, Any], hint: str | None) -> None:
    for sent in (message, {"priority": message.get("priority", 0), "body": message | {"priority": None}}):
        with pytest.raises(InvalidField) as refused:
            read(json.dumps(sent).encode())
        assert refused.value.hint == hint


def test_a_correction_may_be_named_either_way() -> None:
    shorthand = {"prompt": "x", "temperature": 9}
    for fields in (shorthand, {"body": shorthand}):
        for path in ("temperature", "body.temperature"):
            letter = letter_of(fields, InvalidField("expected less", field=path))
            sent = json.loads(redriven(letter, {path: 0.5}, Settings()).value)
            assert sent.get("body", sent)["temperature"] == 0.5
            assert ("body" in sent) == ("body" in fields)


def test_a_line_names_its_fields_as_its_writer_did() -> None:
    for line, field in (
        ({"id": "a\nb", "task": "code", "prompt": "x"}, "id"),
        ({"custom_id": "a\nb", "task": "code", "prompt": "x"}, "custom_id"),
        ({"task": "code", "prompt": "x", "temperature": 9}, "temperature"),
        ({"task": "code", "body": {"prompt": "x", "temperature": 9}}, "body.temperature"),
    ):
        item = JobReader(Settings()).read_line(json.dumps(line).encode(), "f:1")
        assert item.error.field == field


@pytest.mark.parametrize("name", sorted({*Body.model_fields, *UNSUPPORTED, "max_completion_tokens"} - {"prompt"}))
def test_null_in_a_field_of_the_body_is_left_out(name: str) -> None:
    prompt = {"prompt": "x"}
    assert_same({**prompt, name: None}, prompt)
    assert_same({"body": {**prompt, name: None}}, {"body": prompt})
    assert_same({"body": prompt, name: None}, {"body": prompt})
    if name != "messages":
        assert_same({"body": {"messages": [TURN], "prompt": None, name: None}}, {"body": {"messages": [TURN]}})


@pytest.mark.parametrize("name", sorted(Job.model_fields))
def test_null_in_a_field_of_a_job_is_left_out(name: str) -> None:
    assert_same({"prompt": "x", name: None}, {"prompt": "x"})
    if name not in ("body", "body_ref"):
        elsewhere = {"url": "s3://b/a", "sha256": "0" * 64, "num_bytes": 5}
        assert_same({"body_ref": elsewhere, name: None, "body": None}, {"body_ref": elsewhere})


def assert_same(sent: dict[str, Any], without: dict[str, Any]) -> None:
    job, other = read(json.dumps(sent).encode()), read(json.dumps(without).encode())
    assert job.model_copy(update={"job_id": ""}) == other.model_copy(update={"job_id": ""})
    assert payload_digest(job) == payload_digest(other)
    job_validator().validate(sent)


def test_null_is_left_out_within_fields_too() -> None:
    assert_same({"prompt": "x", "logit_bias": {"5": None, "6": 1}}, {"prompt": "x", "logit_bias": {"6": 1}})
    turn = {"role": "user", "content": "x", "name": None, "tool_calls": None}
    assert_same({"messages": [turn]}, {"messages": [TURN]})


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
CHOSEN = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"name": "a", "description": "d", "schema": {"type": "object"}, "strict": True}
PARTS = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}]
#: Bodies with everything in them that has fields of its own.
DEEP: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": PARTS, "name": "n"},
            {"role": "assistant", "content": "x", "tool_calls": [CALL], "reasoning": "r"},
            {"role": "tool", "content": "x", "tool_call_id": "c"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOSEN]}},
    },
    {"messages": [TURN], "tools": [TOOL], "tool_choice": CHOSEN, "chat_template_kwargs": {"enable_thinking": True}},
    {"messages": [TURN], "response_format": {"type": "text"}},
    {"messages": [TURN], "response_format": {"type": "json_object"}},
    {"messages": [TURN], "response_format": {"type": "json_object", "schema": {}}},
    {"messages": [TURN], "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"messages": [TURN], "structured_outputs": {"json": {"type": "object"}}},
    {"messages": [TURN], "structured_outputs": {"regex": "a"}},
]
#: Values whose keys are their sender's: null says something there.
FREE = ("parameters", "schema", "json")


def places(value: Any) -> Iterator[dict[str, Any]]:
    """The objects within a value, itself among them."""
    if isinstance(value, dict):
        yield value
        value = [inner for name, inner in value.items() if name not in FREE]
    for inner in value if isinstance(value, list) else ():
        yield from places(inner)


@pytest.mark.parametrize("number", range(len(DEEP)))
def test_null_is_left_out_wherever_a_field_may_be(number: int) -> None:
    tried = 0
    for place in range(len(list(places(DEEP[number])))):
        for name in [*list(places(DEEP[number]))[place], "later", "schema", "json_schema", "refusal"]:
            sent, without = copy.deepcopy(DEEP[number]), copy.deepcopy(DEEP[number])
            list(places(sent))[place][name] = None
            list(places(without))[place].pop(name, None)
            if refusal_of(without, {}) is None:
                assert_same(sent, without)
                assert_same({"body": sent}, {"body": without})
                tried += 1
    assert tried > 4


def test_text_as_the_form_of_an_answer_says_nothing_and_takes_nothing() -> None:
    with pytest.raises(InvalidField, match="expected type, found 'schema'") as refused:
        read(json.dumps({"prompt": "x", "response_format": {"type": "text", "schema": {}}}).encode())
    assert refused.value.field == "response_format.schema"


def test_null_in_lines_of_batches_and_of_cancellations() -> None:
    line = {"task": "code", "prompt": "x"}
    nulls = dict.fromkeys(["job_id", "custom_id", "id", "segment", "body", "method", "url", "stop"])
    item = JobReader(Settings(), task="code").read_line(json.dumps(nulls | line | {"task": None}).encode(), "f:1")
    assert item.job.body == read(json.dumps(line).encode()).body
    assert parse_cancellation(b'{"action": "cancel", "job_id": "a", "reason": null}').job_id == "a"


def test_parts_of_text_are_joined_with_nothing_between_them() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "cache_control": {}}]
    assert_same({"messages": [{"role": "user", "content": parts}]}, {"messages": [{**TURN, "content": "one two"}]})
