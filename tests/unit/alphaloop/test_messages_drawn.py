"""Messages drawn by hypothesis: every job survives encoding, and any bytes give a job or one of our errors."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC
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
    Job,
    Purpose,
    encode_job,
    payload_digest,
)
from tests.fixtures.messages import read

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


@given(JSON, st.booleans())
def test_what_the_fast_parser_takes_the_other_reads_alike(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    with contextlib.suppress(ValueError):
        assert repr(from_json(text, allow_inf_nan=False)) == repr(json.loads(text))
