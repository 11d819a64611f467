"""Which jobs are equal: everything that decides a greedy text makes another key, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest

from alphaloop.engine import PreparedJob
from alphaloop.messages import Body, Job, Purpose
from alphaloop.server_identity import EngineIdentity
from alphaloop.settings import TaskSettings
from worker.intake.reuse_key import reuse_rule
from worker.intake.validation import sampling_of

IDENTITY: Final = EngineIdentity("own-1-float32", "small", "r1", "float32", "cpu", 4096, "host", ("legal",))
TASK: Final = TaskSettings(reuse=True, max_tokens=77)
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER_TOOL: Final = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
LAST: Final = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def rule(
    body: Mapping[str, Any], *, identity: EngineIdentity = IDENTITY, task: TaskSettings = TASK, **fields: Any
) -> Any:
    job = Job.model_validate({"job_id": "a", "task": "code", "body": dict(body), **fields})
    return reuse_rule(PreparedJob(job, (1, 2), sampling_of(job, task)), task, identity)


def key(body: Mapping[str, Any], **given: Any) -> bytes:
    found = rule(body, **given)
    assert found is not None
    return bytes(found.key)


PROMPT: Final = {"prompt": "x"}
CHAT: Final = {"messages": [{"role": "user", "content": "x"}]}
#: By field, two bodies that differ in it alone.
DECIDES: Final[Mapping[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "prompt": (PROMPT, {"prompt": "y"}),
    "messages": (CHAT, {"messages": [{"role": "system", "content": "x"}]}),
    "model": (PROMPT, PROMPT | {"model": "legal"}),
    "max_tokens": (PROMPT, PROMPT | {"max_tokens": 5}),
    "top_p": (PROMPT, PROMPT | {"top_p": 0.5}),
    "top_k": (PROMPT, PROMPT | {"top_k": 5}),
    "min_p": (PROMPT, PROMPT | {"min_p": 0.5}),
    "repetition_penalty": (PROMPT, PROMPT | {"repetition_penalty": 1.5}),
    "frequency_penalty": (PROMPT, PROMPT | {"frequency_penalty": 0.5}),
    "presence_penalty": (PROMPT, PROMPT | {"presence_penalty": 0.5}),
    "logit_bias": (PROMPT, PROMPT | {"logit_bias": {"5": 1}}),
    "stop": (PROMPT, PROMPT | {"stop": "a"}),
    "stop_token_ids": (PROMPT, PROMPT | {"stop_token_ids": [5]}),
    "tools": (CHAT | {"tools": [TOOL]}, CHAT | {"tools": [OTHER_TOOL]}),
    "tool_choice": (CHAT | {"tools": [TOOL]}, CHAT | {"tools": [TOOL], "tool_choice": "required"}),
    "parallel_tool_calls": (CHAT | {"tools": [TOOL]}, CHAT | {"tools": [TOOL], "parallel_tool_calls": False}),
    "response_format": (CHAT, CHAT | {"response_format": {"type": "json_object"}}),
    "structured_outputs": (PROMPT, PROMPT | {"structured_outputs": {"choice": ["yes", "no"]}}),
    "logprobs": (PROMPT | {"logprobs": 1}, PROMPT | {"logprobs": 2}),
    "top_logprobs": (CHAT | {"logprobs": True}, CHAT | {"logprobs": True, "top_logprobs": 2}),
    "reasoning_effort": (CHAT, CHAT | {"reasoning_effort": "low"}),
    "min_tokens": (PROMPT, PROMPT | {"min_tokens": 5}),
    "ignore_eos": (PROMPT, PROMPT | {"ignore_eos": True}),
    "bad_words": (PROMPT, PROMPT | {"bad_words": ["a"]}),
    "allowed_token_ids": (PROMPT, PROMPT | {"allowed_token_ids": [5]}),
    "include_stop_str_in_output": (PROMPT, PROMPT | {"include_stop_str_in_output": True}),
    "skip_special_tokens": (PROMPT, PROMPT | {"skip_special_tokens": False}),
    "chat_template_kwargs": (CHAT, CHAT | {"chat_template_kwargs": {"enable_thinking": True}}),
    "continue_final_message": ({"messages": LAST}, {"messages": LAST, "continue_final_message": True}),
    "add_generation_prompt": (CHAT, CHAT | {"add_generation_prompt": False}),
    "truncate_prompt_tokens": (PROMPT, PROMPT | {"truncate_prompt_tokens": 5}),
}
#: By field, a value with which the text is the same.
DECIDES_NOTHING: Final = {"seed": 5, "stream": True, "prediction": {"type": "content", "content": "z"}}
#: Sampled jobs, and jobs of several texts, which are sampled, have no key.
SAMPLED: Final = {"temperature", "n"}


def test_each_field_of_a_body_is_known_to_decide_the_text_or_not() -> None:
    assert DECIDES.keys() | DECIDES_NOTHING.keys() | SAMPLED == Body.model_fields.keys()


@pytest.mark.parametrize("field", sorted(DECIDES))
def test_what_decides_a_text_makes_another_key(field: str) -> None:
    one, other = DECIDES[field]
    assert key(one) == key(json.loads(json.dumps(one)))
    assert key(one) != key(other)


@pytest.mark.parametrize("field", sorted(DECIDES_NOTHING))
def test_what_decides_no_text_makes_no_other_key(field: str) -> None:
    assert key(PROMPT | {field: DECIDES_NOTHING[field]}) == key(PROMPT)


def test_a_value_that_is_a_default_is_none_of_its_own() -> None:
    assert key(PROMPT | {"max_tokens": 77, "temperature": 0, "model": "small"}) == key(PROMPT)
    assert key(PROMPT, deadline="2026-01-31T09:00:00Z", priority=3, decoding="vanilla", reuse=True) == key(PROMPT)


def test_jobs_of_other_segments_tasks_targets_and_prompts_in_tokens_are_not_equal() -> None:
    others = [
        key(PROMPT, segment="acme"),
        key(PROMPT, task=TASK.model_copy(update={"max_tokens": 78})),
        *(
            key(PROMPT, identity=replace(IDENTITY, **{name: "other"}))
            for name in ("target", "target_revision", "engine")
        ),
    ]
    job = Job.model_validate({"job_id": "a", "task": "code", "body": PROMPT})
    for one in (job.model_copy(update={"task": "chat"}), job):
        tomorrow = reuse_rule(PreparedJob(one, (1, 2, 3), sampling_of(one, TASK)), TASK, IDENTITY)
        assert tomorrow is not None
        others.append(tomorrow.key)
    assert len({key(PROMPT), *others}) == len(others) + 1


@pytest.mark.parametrize(
    "given",
    [
        {"body": PROMPT | {"temperature": 0.1}},
        {"body": PROMPT, "reuse": False},
        {"body": PROMPT, "purpose": Purpose.CONTROL},
        {"body": PROMPT, "identity": replace(IDENTITY, target_revision="")},
        {"body": PROMPT, "task": TaskSettings()},
        {"body": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "https://x/y.png"}]}]}},
    ],
)
def test_other_jobs_have_no_key(given: dict[str, Any]) -> None:
    assert rule(**given) is None


def test_a_job_may_ask_for_what_its_task_does_not_and_an_image_inside_the_message_never_changes() -> None:
    assert rule(PROMPT, task=TaskSettings(reuse_days=3), reuse=True).max_age == timedelta(days=3)
    images = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": f"data:image/png;base64,{data}"}]}
            ]
        }
        for data in ("AAAA", "AAAB")
    ]
    assert key(images[0]) != key(images[1])
