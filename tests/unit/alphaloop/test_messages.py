from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from alphaloop.errors import InvalidField, MalformedMessage, MessageError
from alphaloop.messages import (
    Body,
    ChatMessage,
    Decoding,
    Failure,
    Job,
    Origin,
    Purpose,
    Result,
    Status,
    dead_letter,
    derived_job_id,
    encode_job,
    parse_job,
    payload_digest,
)
from alphaloop.messages.dead_letter import MAX_REASON_CHARS, PREFIX, SHORTENED, shortened

ORIGIN = Origin("cluster", "jobs.code", 2, 41)
SECRET_PROMPT = "the-prompt-nobody-may-log"


def read(message: object, **limits: int) -> Job:
    value = message if isinstance(message, bytes) else json.dumps(message).encode()
    return parse_job(value, ORIGIN, task="code", **limits)


def test_the_smallest_job_is_a_chat_of_one_user_message() -> None:
    job = read({"task": "code", "prompt": "def f():"})
    assert job.body.messages == (ChatMessage(role="user", content="def f():"),)
    assert job.body.prompt is None
    assert (job.task, job.decoding, job.purpose) == ("code", Decoding.AUTO, Purpose.TRAFFIC)
    assert job.job_id == derived_job_id(ORIGIN, b'{"task": "code", "prompt": "def f():"}')


def test_a_raw_completion_stays_raw() -> None:
    assert read({"body": {"prompt": "def f():"}}).body.prompt == "def f():"


def test_a_derived_id_names_the_record_and_nothing_else() -> None:
    record = Origin("cluster", "jobs.code", 2, 41, 1_700_000_000_000)
    others = {
        derived_job_id(replace(record, **change), b"{}")
        for change in (
            {"cluster": "other"},
            {"topic": "jobs.sql"},
            {"partition": 1},
            {"offset": 42},
            {"timestamp_ms": 1_700_000_000_001},
            {"timestamp_ms": None},
        )
    }
    same = derived_job_id(record, b"{}")
    assert derived_job_id(replace(record), b"{}") == same, "a redelivery is the same job"
    assert same not in others
    assert len(others) == 6


def test_offsets_that_begin_again_give_other_ids() -> None:
    first = Origin("cluster", "jobs.code", 0, 0, 1_700_000_000_000)
    after_a_restart = replace(first, timestamp_ms=1_700_000_060_000)
    assert derived_job_id(first, b"{}") != derived_job_id(after_a_restart, b"{}")


def test_another_payload_is_never_a_conflict_of_derived_ids() -> None:
    # A sender may set the timestamps of its records, to 0 for example.
    replayed = Origin("cluster", "jobs.code", 0, 0, 0)
    one, other = (parse_job(b'{"prompt": "' + text + b'"}', replayed, task="code") for text in (b"first", b"second"))
    assert one.job_id != other.job_id


def test_fields_of_data_sets_and_of_clients_are_dropped() -> None:
    job = read({"prompt": "x", "user": "u", "nested": {"a": [1]}, "source": "s", "task_id": 3, "prompts": ["y"]})
    assert read({"body": {"prompt": "x", "store": True, "tempreature": None}}).body.prompt == "x"
    assert job.body.messages is not None


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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"nonsense", "expected JSON, found no value at character 0"),
        (b"{'prompt': 1}", "expected JSON, found no name in double quotes at character 1"),
        (b'{"prompt": "x"} {}', "expected JSON, found more text behind the value at character 16"),
    ],
)
def test_what_is_no_json_is_said_in_words(value: bytes, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        parse_job(value, Origin("c", "jobs.code", 0, 0), task="code")


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


def test_nulls_of_openai_clients_are_unset_fields() -> None:
    nulls = {
        "stop": None,
        "stop_token_ids": None,
        "logit_bias": None,
        "min_p": None,
        "stream": None,
        "temperature": None,
        "tools": None,
        "n": None,
        "messages": None,
    }
    job = read({"prompt": "x", **nulls})
    assert job.body == read({"prompt": "x"}).body


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


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"prompt": 5}, "body.prompt"),
        ({"prompt": ["x"]}, "body.prompt"),
        ({"prompt": ""}, "body"),
        ({"prompt": " \n\t"}, "body"),
        ({"prompt": None}, "body"),
        ({}, "body"),
        ({"body": {}}, "body"),
        ({"body": []}, "body"),
        ({"body": {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}}, "body"),
        ({"body": {"messages": []}}, "body.messages"),
        ({"body": {"messages": {"role": "user", "content": "x"}}}, "body.messages"),
        (
            {"body": {"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]}},
            "body.messages.1.role",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "body.messages.0.content"),
        ({"prompt": "x", "temperature": "1"}, "body.temperature"),
        ({"prompt": "x", "temperature": 2.1}, "body.temperature"),
        ({"prompt": "x", "temperature": True}, "body.temperature"),
        ({"prompt": "x", "top_p": 0}, "body.top_p"),
        ({"prompt": "x", "max_tokens": 0}, "body.max_tokens"),
        ({"prompt": "x", "max_tokens": 5.5}, "body.max_tokens"),
        ({"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}, "body"),
        ({"prompt": "x", "n": 2}, "body"),
        ({"prompt": "x", "logprobs": True}, "body"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "body"),
        ({"prompt": "x", "seed": 2**63}, "body.seed"),
        ({"prompt": "x", "stop": ["a"] * 5}, "body.stop"),
        ({"prompt": "x", "stop": [""]}, "body.stop.0"),
        ({"prompt": "x", "stop": 5}, "body.stop"),
        ({"prompt": "x", "stream": 1}, "body.stream"),
        ({"prompt": "x", "top_k": -2}, "body.top_k"),
        ({"prompt": "x", "min_p": 1.1}, "body.min_p"),
        ({"prompt": "x", "repetition_penalty": 0}, "body.repetition_penalty"),
        ({"prompt": "x", "frequency_penalty": 2.1}, "body.frequency_penalty"),
        ({"prompt": "x", "presence_penalty": -2.1}, "body.presence_penalty"),
        ({"prompt": "x", "logit_bias": [[5, 1.0]]}, "body.logit_bias"),
        ({"prompt": "x", "logit_bias": {"the": 1.0}}, "body.logit_bias"),
        ({"prompt": "x", "logit_bias": {"05": 1.0}}, "body.logit_bias"),
        ({"prompt": "x", "logit_bias": {"-1": 1.0}}, "body.logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": 100.5}}, "body.logit_bias.5"),
        ({"prompt": "x", "logit_bias": {"5": None}}, "body.logit_bias.5"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "body.logit_bias"),
        ({"prompt": "x", "stop_token_ids": 5}, "body.stop_token_ids"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "body.stop_token_ids.0"),
        ({"prompt": "x", "stop_token_ids": [3, True]}, "body.stop_token_ids.1"),
        ({"prompt": "x", "stop_token_ids": list(range(65))}, "body.stop_token_ids"),
        ({"prompt": "x", "min_tokens": 3}, "body"),
        ({"prompt": "x", "ignore_eos": True}, "body"),
        ({"prompt": "x", "decoding": "fast"}, "decoding"),
        ({"prompt": "x", "purpose": 5}, "purpose"),
        ({"prompt": "x", "priority": True}, "priority"),
        ({"prompt": "x", "deadline": 60}, "deadline"),
        ({"prompt": "x", "deadline": "60"}, "deadline"),
        ({"prompt": "x", "deadline": "2026-01-31T09:00:00"}, "deadline"),
        ({"prompt": "x", "job_id": "two words"}, "job_id"),
        ({"prompt": "x", "job_id": "line\n"}, "job_id"),
        ({"prompt": "x", "job_id": "x" * 201}, "job_id"),
        ({"prompt": "x", "custom_id": "a\x00b"}, "custom_id"),
        ({"prompt": "x", "segment": ""}, "segment"),
        ({"prompt": "x", "task": 5}, "task"),
        ({"prompt": "x", "task": "sql"}, "task"),
        ({"prompt": "x", "probe_num_draft_tokens": 0}, "probe_num_draft_tokens"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(message)
    assert caught.value.field == field
    assert "tuple" not in str(caught.value).lower()


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
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 200_000, "nesting"),
        (b'{"a":' * 200_000, "nesting"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "found 33"),
    ],
)
def test_what_is_not_a_json_object_is_malformed(value: bytes | None, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said) as caught:
        parse_job(value, ORIGIN, task="code", max_bytes=2 << 20)
    assert caught.value.field is None


def test_the_limits_are_the_last_allowed_values() -> None:
    value = json.dumps({"prompt": "x", "deep": [[[]]]}).encode()
    assert read(value, max_bytes=len(value), max_depth=4).task == "code"
    with pytest.raises(MalformedMessage, match=f"at most {len(value) - 1} bytes, found {len(value)}"):
        read(value, max_bytes=len(value) - 1)
    with pytest.raises(MalformedMessage, match="at most 3 levels of nesting, found 4"):
        read(value, max_depth=3)


@pytest.mark.parametrize(
    "message",
    [
        {"body": {"prompt": 5, "messages": SECRET_PROMPT}},
        {"prompt": SECRET_PROMPT, "temperature": SECRET_PROMPT},
        {"messages": [{"role": SECRET_PROMPT, "content": SECRET_PROMPT}]},
        {"prompt": SECRET_PROMPT, "stop": [SECRET_PROMPT * 20]},
        {"prompt": SECRET_PROMPT, "n": 3},
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


def test_the_digest_tells_a_redelivery_from_a_conflict() -> None:
    job = read({"job_id": "a", "prompt": "x", "temperature": 1})
    chat = [{"role": "user", "content": "x"}]
    again = read({"temperature": 1.0, "priority": 0, "job_id": "a", "messages": chat} | {"stream": None})
    assert payload_digest(job) == payload_digest(again)
    for other in [{"prompt": "y"}, {"temperature": 0.5}, {"segment": "s"}, {"decoding": "vanilla"}, {"max_tokens": 5}]:
        assert payload_digest(read({"job_id": "a", "prompt": "x", "temperature": 1} | other)) != payload_digest(job)
    assert payload_digest(read({"job_id": "b", "prompt": "x", "temperature": 1})) == payload_digest(job)


def test_a_later_releases_new_field_does_not_turn_old_jobs_into_conflicts() -> None:
    class LaterJob(Job):
        lane: str = "normal"

    old = read({"prompt": "x"})
    assert payload_digest(LaterJob.model_validate(old.model_dump())) == payload_digest(old)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
LABEL = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=[chr(c) for c in (*range(32), 127)]),
    min_size=1,
    max_size=100,
)
MESSAGES = st.lists(
    st.builds(ChatMessage, role=st.sampled_from(["system", "user", "assistant"]), content=TEXT), min_size=1, max_size=4
).map(tuple)
SAMPLING = {
    "max_tokens": st.none() | st.integers(1, 1_000_000),
    "temperature": st.none() | st.floats(0, 2),
    "top_p": st.none() | st.floats(0, 1, exclude_min=True),
    "top_k": st.none() | st.integers(-1, 10**9),
    "min_p": st.none() | st.floats(0, 1),
    "repetition_penalty": st.none() | st.floats(0.01, 100),
    "frequency_penalty": st.none() | st.floats(-2, 2),
    "presence_penalty": st.none() | st.floats(-2, 2),
    "logit_bias": st.none()
    | st.dictionaries(st.integers(0, 200_000).map(str), st.floats(-100, 100), min_size=1, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 200_000), max_size=3).map(tuple),
    "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), max_size=4).map(tuple),
    "stream": st.booleans(),
}
BODIES = st.builds(Body, messages=MESSAGES, **SAMPLING) | st.builds(Body, prompt=TEXT, **SAMPLING)
JOBS = st.builds(
    Job,
    job_id=st.from_regex(r"[!-~]{1,200}", fullmatch=True),
    task=st.just("code"),
    body=BODIES,
    custom_id=st.none() | LABEL,
    segment=st.none() | LABEL,
    priority=st.integers(-100, 100),
    deadline=st.none() | st.datetimes(timezones=st.just(UTC)),
    decoding=st.sampled_from(Decoding),
    purpose=st.sampled_from(Purpose),
    probe_num_draft_tokens=st.none() | st.integers(1, 64),
)


@given(JOBS)
def test_every_job_survives_encoding(job: Job) -> None:
    assert read(encode_job(job)) == job
    assert payload_digest(read(encode_job(job))) == payload_digest(job)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(), child, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(sorted({*Job.model_fields, *Body.model_fields, "max_completion_tokens", "n", "tools"}))


@given(st.binary(max_size=300))
def test_bytes_give_a_job_or_one_of_our_errors(value: bytes) -> None:
    with pytest.raises(MessageError):
        read(value)


@given(st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_object_gives_a_job_or_one_of_our_errors(fields: dict[str, Any]) -> None:
    try:
        job = read(json.dumps(fields).encode("utf-8", "surrogatepass"))
    except MessageError as error:
        str(error).encode("utf-8", "replace")
    else:
        assert read(encode_job(job)) == job


@given(JOBS, FIELDS, JSON)
def test_one_wrong_field_never_crashes_the_reader(job: Job, name: str, wrong: object) -> None:
    fields = json.loads(encode_job(job))
    (fields if name in Job.model_fields else fields["body"])[name] = wrong
    with contextlib.suppress(InvalidField, MalformedMessage):
        read(json.dumps(fields).encode())


def test_a_deadline_passes_at_its_instant() -> None:
    job = read({"prompt": "x", "deadline": "2026-01-31T10:00:00+01:00"})
    assert not job.is_expired(datetime(2026, 1, 31, 8, 59, 59, tzinfo=UTC))
    assert job.is_expired(datetime(2026, 1, 31, 9, tzinfo=UTC))
    assert not read({"prompt": "x"}).is_expired(datetime.max.replace(tzinfo=UTC))


def test_a_dead_letter_keeps_the_message_and_says_why() -> None:
    error = InvalidField("expected less, found more", field="body.temperature", hint="lower it")
    kept = [("traceparent", b"00-ab"), ("ce_id", b"\xff\x00")]
    headers = [*kept, (PREFIX + "old", b"1")]
    letter = dead_letter(error, ORIGIN, group="workers", num_deliveries=3, key=b"k", value=b"\xff", headers=headers)
    assert (letter.topic, letter.key, letter.value) == ("jobs.code.dlq", b"k", b"\xff")
    assert list(letter.headers[:2]) == kept
    said = dict(letter.headers[2:])
    assert said == {
        PREFIX + "topic": b"jobs.code",
        PREFIX + "partition": b"2",
        PREFIX + "offset": b"41",
        PREFIX + "group": b"workers",
        PREFIX + "delivery.count": b"3",
        PREFIX + "message": b"body.temperature: expected less, found more\nhint: lower it",
        PREFIX + "exception": b"invalid_field",
        PREFIX + "field": b"body.temperature",
    }


def test_a_senders_long_field_name_is_cut_in_the_letter() -> None:
    error = InvalidField("expected a number", field="body.logit_bias." + "9" * 100_000)
    letter = dead_letter(error, ORIGIN, group="g", num_deliveries=1, key=None, value=b"", headers=())
    assert sum(len(name) + len(value) for name, value in letter.headers) < 4 * MAX_REASON_CHARS
    assert dict(letter.headers)[PREFIX + "field"].startswith(b"body.logit_bias.999")


def test_a_letter_sent_back_and_refused_again_carries_one_reason() -> None:
    first = dead_letter(
        MalformedMessage("x" * 9999), ORIGIN, group="g", num_deliveries=1, key=None, value=b"", headers=()
    )
    again = dead_letter(
        MalformedMessage("later"), ORIGIN, group="g", num_deliveries=2, key=None, value=b"", headers=first.headers
    )
    names = [name for name, _ in again.headers]
    assert len(names) == len(set(names))
    assert len(dict(first.headers)[PREFIX + "message"]) == MAX_REASON_CHARS
    assert dict(again.headers)[PREFIX + "message"] == b"later"


def test_a_result_is_sent_as_it_is_read_back() -> None:
    result = Result(
        job_id="j",
        status=Status.FAILED,
        task="code",
        attempt=1,
        recorded_at=datetime(2026, 1, 31, tzinfo=UTC),
        error=Failure(code="decode_failed", message="ä", hint=None),
    )
    assert Result.decode(result.encode()) == result
    assert Result.decode(result.encode()).encode() == result.encode()
    assert "text" not in json.loads(result.encode())


def test_a_shortened_letter_loses_headers_and_a_long_key_and_says_so() -> None:
    letter = dead_letter(
        MalformedMessage("no"),
        ORIGIN,
        group="g",
        num_deliveries=1,
        key=b"k" * 5000,
        value=b"v",
        headers=[("big", b"h" * 20_000), ("small", b"s")],
    )
    less = shortened(letter)
    assert less is not None
    assert (less.key, less.value) == (None, b"v")
    headers = dict(less.headers)
    assert headers[PREFIX + "exception"] == b"malformed_message"
    assert headers[SHORTENED] == b"20009 bytes of headers left out; a key of 5000 bytes left out"
    assert {"big", "small"}.isdisjoint(headers)
    least = shortened(less)
    assert least is not None
    assert least.value == b""
    assert shortened(least) is None


@given(JSON, st.booleans())
def test_what_the_fast_parser_takes_the_other_reads_alike(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    with contextlib.suppress(ValueError):
        assert repr(from_json(text, allow_inf_nan=False)) == repr(json.loads(text))
