"""What a server serves as it was started: what it refuses, what it takes and ignores, and which adapters it has."""

from __future__ import annotations

from typing import Any, Final

import pytest

from alphaloop.engine import Sampling
from alphaloop.errors import InvalidField
from alphaloop.messages import Body, Job
from alphaloop.messages.capabilities import Feature
from alphaloop.server_identity import ServerKind
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import (
    MODEL,
    Answer,
    Connection,
    ServedEngine,
    ask,
    engine_over,
    whole,
)
from worker.servers.features import ask_lacking

USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 9}
OF_TOOLS: Final = {Feature.TOOLS, Feature.ALLOWED_TOOLS, Feature.ONE_CALL}


def text(said: str, body: dict[str, Any]) -> dict[str, Any]:
    """A reply that says only this, whatever was asked for."""
    message = {"message": {"role": "assistant", "content": said}} if "messages" in body else {"text": said}
    used = {**USAGE, "completion_tokens": min(9, body["max_tokens"])}
    return {"model": "smollm2", "choices": [{"index": 0, "finish_reason": "stop", **message}], "usage": used}


def able(body: dict[str, Any]) -> dict[str, Any]:
    """A reply of a server that does all that it is asked for."""
    said = "{" if "response_format" in body or "json" in body.get("structured_outputs", {}) else "seventeen"
    reply = text(said, body)
    (choice,) = reply["choices"]
    if body.get("tool_choice") == "required":
        call = {"id": "c", "type": "function", "function": {"name": "count_legs", "arguments": "{}"}}
        choice |= {"message": {"content": None, "tool_calls": [call]}}
    if "logprobs" in body:
        choice["logprobs"] = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
    if body["n"] == 2:
        reply["choices"] = [choice, {**choice, "index": 1}]
    return reply


def answering(reply: Any, *, refuses: tuple[str, ...] = ()) -> Answer:
    async def answer(connection: Connection) -> None:
        body = connection.asked.body
        if refuses and any(name in body for name in refuses):
            await whole({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, 400)(connection)
        else:
            await whole(reply(body))(connection)

    return answer


def lacking(answer: Answer, kind: ServerKind = "vllm") -> dict[Feature, str]:
    found, _ = ask(answer, ask_lacking, kind)
    return found


def test_a_server_that_does_all_lacks_nothing() -> None:
    assert lacking(answering(able)) == {}


def test_what_a_server_refuses_it_lacks() -> None:
    found = lacking(answering(able, refuses=("tools",)))
    assert found.keys() == OF_TOOLS | {Feature.TOOL_CHOICE}
    assert set(found.values()) == {"the server answered 400 (BadRequestError)"}


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_what_a_server_ignores_it_lacks(kind: ServerKind) -> None:
    """A llama.cpp without --jinja reads no tools, a vLLM with a parser of reasoning no constraints of prompts."""
    found = lacking(answering(lambda body: text("Four legs.", body)), kind)
    ignored = {Feature.TOOL_CHOICE, Feature.JSON_SCHEMA, Feature.JSON_OBJECT, Feature.LOGPROBS, Feature.N} | OF_TOOLS
    constraints = {Feature.REGEX, Feature.CHOICE, Feature.GRAMMAR, Feature.PROMPT_CONSTRAINT}
    assert found.keys() == ignored | (constraints if kind == "vllm" else set())


def test_a_server_that_is_away_lacks_nothing_that_is_known() -> None:
    assert lacking(answering(able, refuses=())) == lacking(whole({"error": "busy"}, 503)) == {}


def test_a_job_that_no_server_serves_is_refused_with_its_field() -> None:
    with engine_over({"plain": ServedEngine(FakeEngine())}) as engine:
        tool = {"type": "function", "function": {"name": "f"}}
        messages = [{"role": "user", "content": "hi"}]
        body = Body.model_validate({"messages": messages, "tools": [tool]})
        # What workers of one target compare: only what the server serves as it was started.
        assert Feature.TOP_K in engine.features
        assert Feature.TOOLS not in engine.features
        with pytest.raises(InvalidField, match="as it was started") as caught:
            engine.prepare(Job(job_id="job", task="code", body=body), Sampling(5, 0.0))
        assert caught.value.field == "body.tools"


def test_an_adapter_is_a_target_of_its_own_and_goes_where_it_is() -> None:
    class WithAdapters(ServedEngine):
        async def __call__(self, connection: Connection) -> None:
            if not connection.asked.path.endswith("/models"):
                return await ServedEngine.__call__(self, connection)
            cards = [{"id": MODEL, "parent": None}, {"id": "tiny", "parent": MODEL}, {"id": "x", "parent": "y"}]
            return await whole({"data": cards})(connection)

    with engine_over({"plain": ServedEngine(FakeEngine()), "adapted": WithAdapters(FakeEngine())}) as engine:
        identity = engine.identity
        assert identity.adapters == ("tiny",)
        adapted = identity.of("tiny")
        assert (adapted.target, adapted.target_revision) == ("tiny", f"{identity.target_revision}+tiny")
        assert identity.of(None) is identity.of(MODEL) is identity
        assert [server.adapters for server in engine._servers] == [frozenset(), {"tiny"}]
        with pytest.raises(InvalidField, match="the model served here"):
            engine.prepare(Job(job_id="job", task="code", body=Body(prompt="p", model="x")), Sampling(5, 0.0))
