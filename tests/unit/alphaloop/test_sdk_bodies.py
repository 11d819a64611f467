"""Bodies as openai, litellm, LangChain and instructor build them are read, or refused with the field that is not.

How they were made: tests/sdk_bodies/capture.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.errors import InvalidField
from alphaloop.messages import Body, Job, Origin, encode_job, parse_job, payload_digest
from alphaloop.messages.answer_form import GUIDED
from alphaloop.messages.body import UNSUPPORTED
from alphaloop.messages.job import HARMLESS
from tests import sdk_bodies
from tests.fixtures.messages import asked_for, job_validator, read

FILE: Final = Path(sdk_bodies.__file__).with_name("bodies.jsonl")
BODIES: Final[dict[str, dict[str, Any]]] = {
    line["case"]: line["body"] for line in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
}
REFUSED: Final = {
    "openai: a custom tool": "tools.0.type",
    "openai: sound": "messages.0.content.0.type",
    "openai: a search on the web": "web_search_options",
    "openai: functions": "functions",
    "openai: a prompt in several": "prompt",
    "openai: an echo": "echo",
}
#: What the cases ask of an engine, where it is not what every engine can do.
ASKED: Final = {
    "openai: settings": "presence_penalty",
    "openai: tools": "tools",
    "openai: a forced call": "parallel_tool_calls tool_choice tools",
    "openai: a named call": "tool_choice tools",
    "openai: allowed tools": "tool_choice.allowed_tools tools",
    "openai: what a tool gave": "messages.tool_calls tools",
    "openai: a JSON object": "response_format",
    "openai: a schema": "response_format.json_schema",
    "openai: a parsed model": "response_format.json_schema",
    "openai: a parsed tool": "tools",
    "openai: log-probabilities": "logprobs",
    "openai: three texts": "n",
    "openai: effort": "reasoning_effort",
    "openai: an image": "messages.content.image_url",
    "openai: an image inside": "messages.content.image_url",
    "openai: a bias": "logit_bias",
    "openai: vLLM's choice": "structured_outputs.choice",
    "openai: vLLM's older schema": "response_format.json_schema",
    "openai: vLLM's settings": "ignore_eos min_p min_tokens top_k",
    "openai: no thinking": "chat_template_kwargs",
    "openai: a text that goes on": "continue_final_message",
    "openai: a prompt's log-probabilities": "logprobs",
    "litellm: tools": "tools",
    "litellm: a forced call": "tool_choice tools",
    "litellm: what a tool gave": "messages.tool_calls tools",
    "litellm: a model as the format": "response_format.json_schema",
    "litellm: a JSON object": "response_format",
    "litellm: effort": "reasoning_effort",
    "litellm: an image": "messages.content.image_url",
    "litellm: three texts": "n",
    "litellm: log-probabilities": "logprobs",
    "litellm: vLLM's fields": "repetition_penalty structured_outputs.regex",
    "litellm: what was thought": "messages.reasoning",
    "langchain: tools": "tools",
    "langchain: any tool": "tool_choice tools",
    "langchain: a named tool": "tool_choice tools",
    "langchain: a strict tool": "parallel_tool_calls tools",
    "langchain: what a tool gave": "messages.tool_calls tools",
    "langchain: a model by json_schema": "response_format.json_schema",
    "langchain: a model by function_calling": "parallel_tool_calls tool_choice tools",
    "langchain: a model by json_mode": "response_format",
    "langchain: tools and a format": "response_format.json_schema tools tools beside a constraint",
    "langchain: three texts": "n",
    "langchain: log-probabilities": "logprobs",
    "langchain: an image": "messages.content.image_url",
    "langchain: an image as a block": "messages.content.image_url",
    "langchain: effort": "reasoning_effort",
    "langchain: vLLM's fields": "structured_outputs.choice top_k",
    "instructor: TOOLS": "tool_choice tools",
    "instructor: TOOLS_STRICT": "tool_choice tools",
    "instructor: JSON": "response_format",
    "instructor: JSON_SCHEMA": "response_format.json_schema",
}


@pytest.mark.parametrize("case", sorted(BODIES.keys() - REFUSED.keys()))
def test_what_a_library_sends_is_read_whole(case: str) -> None:
    body = BODIES[case]
    job = read({"body": body})
    assert " ".join(sorted(asked_for(job.body))) == ASKED.get(case, "")
    known = {*Body.model_fields, *GUIDED, *UNSUPPORTED, *HARMLESS, "max_completion_tokens"}
    assert {name for name, value in body.items() if value is not None} <= known, "nothing of it is left out"
    assert job_validator().is_valid({"body": body})
    again = parse_job(encode_job(job), Origin("another", "jobs.code", 0, 0), task="code")
    assert (again.body, payload_digest(again)) == (job.body, payload_digest(job))


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_served_is_refused_with_its_field(case: str) -> None:
    for message, within in (({"body": BODIES[case]}, "body."), (BODIES[case], "")):
        if within == "" and case == "openai: a search on the web":
            assert isinstance(read(message), Job), "a column of a data set beside a prompt"
            continue
        with pytest.raises(InvalidField) as refused:
            read(message)
        assert refused.value.field == f"{within}{REFUSED[case]}"


def test_there_are_sixty_of_four_libraries() -> None:
    assert len(BODIES) >= 60
    assert {case.partition(":")[0] for case in BODIES} == {"openai", "litellm", "langchain", "instructor"}
