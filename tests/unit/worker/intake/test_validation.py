"""From a message and its task's settings to the sampling settings the engine gets, and to the prompts not drafted for.

Patterns that switch speculation off stand beside regular expressions of the same meaning. Of cancellation requests the
right ones are read and the wrong ones named.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.engine import Sampling, SamplingDefaults
from alphaloop.errors import MessageError
from alphaloop.messages import Constraint, Purpose
from alphaloop.settings import TaskSettings
from tests.fakes import FakeEngine
from tests.fixtures.publishing import delivery, validation
from worker.background import Retry
from worker.intake.control import parse_cancellation
from worker.intake.partitions import Delivery
from worker.intake.validation import OF_BODY, Fetching, Refusal, covers
from worker.servers.request_body import body_of

TASK = TaskSettings(max_tokens=77, temperature=0.6, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.05)


def sent(fields: dict[str, Any], task: str = "code") -> Delivery:
    return delivery("", task=task, value=json.dumps(fields).encode())


READING = validation(tasks={"code": TASK})


def read(**body: Any) -> Sampling:
    return READING.read(sent({"body": {"prompt": "x", **body}})).prepared.sampling


def test_what_a_job_leaves_out_is_its_tasks() -> None:
    nothing = {"temperature": None, "top_k": None, "min_p": None, "logit_bias": None, "stop_token_ids": None}
    expected = Sampling(max_tokens=77, temperature=0.6, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.05)
    assert read() == read(**nothing) == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 2, "temperature": 0}, "body.n"),
        ({"min_tokens": 78}, "body.min_tokens"),
    ],
)
def test_what_contradicts_the_task_is_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(MessageError) as refused:
        read(**body)
    assert refused.value.field == field
    assert read(n=2, min_tokens=77).n == 2, "the task samples, and writes so many"


#: Each setting of a body, with the value that the engine gets where that is another one.
OF_A_BODY: Mapping[str, tuple[Any, Any]] = {
    "max_tokens": (5, 5),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (7, 7),
    "min_p": (0.2, 0.2),
    "repetition_penalty": (1.5, 1.5),
    "frequency_penalty": (-0.5, -0.5),
    "presence_penalty": (0.25, 0.25),
    "logit_bias": ({"12": -100, "3": 1.5}, ((3, 1.5), (12, -100.0))),
    "seed": (0, 0),
    "stop": ("a", ("a",)),
    "stop_token_ids": ([9, 2], (9, 2)),
    "n": (3, 3),
    "min_tokens": (2, 2),
    "ignore_eos": (True, True),
    "bad_words": (["a"], ("a",)),
    "allowed_token_ids": ([5, 6], (5, 6)),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
}


@pytest.mark.parametrize("name", sorted(OF_BODY))
def test_each_setting_of_a_body_reaches_the_engine_and_a_server_under_its_name(name: str) -> None:
    sent_value, expected = OF_A_BODY[name]
    prepared = READING.read(sent({"body": {"prompt": "x", name: sent_value}})).prepared
    assert getattr(prepared.sampling, name) == expected
    assert replace(prepared.sampling, **{name: getattr(read(), name)}) == read(), "and no other setting does"
    request = body_of("vllm", "model", prepared.job, prepared.sampling, stream=False)
    assert json.loads(json.dumps(request[name])) == ([sent_value] if name == "stop" else sent_value)


def test_logprobs_and_a_constraint_reach_the_engine() -> None:
    assert (read(logprobs=4).num_logprobs, read(logprobs=4).constraint) == (4, None)
    constraint = read(guided_choice=["yes", "no"]).constraint
    assert constraint == Constraint("choice", '["yes","no"]', "body.structured_outputs.choice")


def test_what_neither_a_job_nor_its_task_says_is_the_models_where_that_is_wanted() -> None:
    tasks = {"code": TaskSettings(top_p=1.0), "chat": TaskSettings()}

    def found(task: str, *, are_used: bool = True, **body: Any) -> Sampling:
        engine = FakeEngine()
        engine.sampling_defaults = SamplingDefaults({"temperature": 0.8, "top_p": 0.7, "top_k": 5}, are_used=are_used)
        # `chat` is known only after the tasks were read again.
        reading = validation(engine, {"code": tasks["code"]}, reread_tasks=lambda: tasks)
        return reading.read(sent({"body": {"prompt": "x", "max_tokens": 9, **body}}, task)).prepared.sampling

    assert found("code") == Sampling(9, 0.8, top_p=1.0, top_k=5)
    assert found("chat") == Sampling(9, 0.8, top_p=0.7, top_k=5)
    assert found("chat", temperature=0, top_k=0) == Sampling(9, 0.0, top_p=0.7)
    assert found("chat", are_used=False) == Sampling(9, 0.0)


def test_a_job_may_take_back_what_its_task_sets() -> None:
    neutral = read(max_tokens=5, temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    assert neutral == Sampling(max_tokens=5, temperature=0.0)


@pytest.mark.parametrize(
    ("body", "bucket"),
    [
        ({"temperature": 0, "repetition_penalty": 1, "seed": 4}, "greedy"),
        ({"temperature": 0}, "greedy,adjusted"),
        ({"repetition_penalty": 1}, "t<=1.0,cut"),
        ({"repetition_penalty": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0}, "t<=1.0,seeded"),
        ({"repetition_penalty": 1, "top_k": 0, "top_p": 1}, "t<=1.0,cut"),
        ({"repetition_penalty": 1, "presence_penalty": 0.1}, "t<=1.0,cut,adjusted"),
        ({"repetition_penalty": 1, "frequency_penalty": 0.1}, "t<=1.0,cut,adjusted"),
        ({"repetition_penalty": 1, "logit_bias": {"5": 1}, "seed": 1}, "t<=1.0,cut,seeded,adjusted"),
    ],
)
def test_jobs_that_are_sampled_in_another_way_have_another_history(body: dict[str, Any], bucket: str) -> None:
    assert read(**body).bucket == bucket


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "x", "model": "another"}, "model"),
        ({"body": {"prompt": "x", "model": "another"}}, "body.model"),
        ({"prompt": "x " * 5000}, "prompt"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
    ],
)
def test_what_the_worker_refuses_is_named_as_it_was_sent(fields: dict[str, Any], field: str) -> None:
    reading, refused = Fetching(None, READING, retry=Retry(threading.Event()), wake=lambda: None), list[Refusal]()
    assert reading.read(sent(fields), refused) is None
    assert [error.field for _, error in refused] == [field]


@given(st.text("abA*.\n", max_size=12), st.text("abA.\n*", max_size=30))
def test_a_pattern_means_what_a_regular_expression_of_it_means(pattern: str, text: str) -> None:
    expression = ".*".join(re.escape(literal) for literal in pattern.casefold().split("*"))
    expected = re.fullmatch(expression, text.casefold(), re.DOTALL) is not None
    assert covers(pattern, text.casefold()) == expected


def test_no_prompt_takes_long_to_compare() -> None:
    # A matcher that goes back on its choices tries some 10 ** 200 of them here.
    assert not covers("*a" * 50 + "*b*", "a" * 200_000)


LISTED = {"code": TaskSettings(vanilla_patterns=("*```diff*", "Translate *"))}


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"prompt": "Review this:\n```DIFF\n+1\n```"}, "*```diff*"),
        ({"prompt": "translate this: ```diff"}, "*```diff*"),
        ({"prompt": "translate this"}, "Translate *"),
        ({"prompt": "Please translate this"}, ""),
        (
            {"messages": [{"role": "system", "content": "Translate it."}, {"role": "user", "content": "Bonjour"}]},
            "Translate *",
        ),
        ({"messages": [{"role": "user", "content": "Translate"}, {"role": "user", "content": " it"}]}, ""),
    ],
)
def test_the_first_pattern_that_covers_a_prompt_or_a_message_counts_and_only_of_traffic(
    body: dict[str, Any], pattern: str
) -> None:
    reading = validation(tasks=LISTED)
    for purpose in Purpose:
        found = reading.read(sent({"purpose": purpose, "body": body})).lane.switched_off
        assert found == (pattern if purpose is Purpose.TRAFFIC else ""), "probes and controls measure whatever they say"


def test_a_task_list_that_is_read_again_brings_its_patterns() -> None:
    newer = {"code": TaskSettings(vanilla_patterns=("Bonjour",)), "sql": TaskSettings()}
    reading, fields = validation(tasks=LISTED, reread_tasks=lambda: newer), {"body": {"prompt": "Bonjour"}}
    found = [reading.read(sent(fields, task)).lane.switched_off for task in ("code", "sql", "code")]
    assert found == ["", "", "Bonjour"]


def test_a_cancellation_names_its_job() -> None:
    assert parse_cancellation(b'{"action": "cancel", "job_id": "a-1", "why": "changed my mind"}').job_id == "a-1"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, None),
        (b"cancel a-1", None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b'["cancel"]', None),
        (b'{"action": "pause", "job_id": "a"}', "action"),
        (b'{"action": "cancel"}', "job_id"),
        (b'{"action": "cancel", "job_id": "a b"}', "job_id"),
        (b'{"action": "cancel", "job_id": 7}', "job_id"),
    ],
)
def test_a_wrong_cancellation_is_refused_with_its_field(value: bytes | None, field: str | None) -> None:
    with pytest.raises(MessageError) as refused:
        parse_cancellation(value)
    assert refused.value.field == field
