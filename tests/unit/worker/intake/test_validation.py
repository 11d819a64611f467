"""From a message and its task's settings to the sampling settings the engine gets."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from alphaloop.settings import TaskSettings
from tests.fakes import FakeEngine
from tests.fixtures.publishing import delivery, validation
from worker.background import Retry
from worker.engine import Sampling, SamplingDefaults
from worker.intake.partitions import Delivery
from worker.intake.validation import Fetching, Refusal

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


def test_what_a_job_says_is_what_the_engine_gets() -> None:
    found = read(
        max_tokens=5,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=0,
        repetition_penalty=1,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias={"12": -100, "3": 1.5},
        seed=0,
        stop="a",
        stop_token_ids=[9, 2],
    )
    assert found == Sampling(
        max_tokens=5,
        temperature=0.0,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        seed=0,
        stop=("a",),
        logit_bias=((3, 1.5), (12, -100.0)),
        stop_token_ids=(9, 2),
    )


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
