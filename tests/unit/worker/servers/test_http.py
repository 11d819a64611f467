"""An endpoint's address, key and limits; events however bytes are cut; bodies that leave nothing to defaults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from alphaloop.engine import Sampling
from alphaloop.errors import ConfigError
from alphaloop.messages import Origin, Purpose, parse_job
from alphaloop.server_identity import ServerKind
from tests.fixtures.models import make_job
from worker.servers.client import ServerClient
from worker.servers.http import endpoint_of, events
from worker.servers.request_body import body_of


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://gpu:8000", "http://gpu:8000/v1", "http://gpu:8000"),
        ("http://gpu:8000/", "http://gpu:8000/v1", "http://gpu:8000"),
        ("https://gpu/v1/", "https://gpu/v1", "https://gpu"),
        ("https://gate/team/v1", "https://gate/team/v1", "https://gate/team"),
    ],
)
def test_the_address_is_taken_as_openai_clients_take_it(url: str, api: str, root: str) -> None:
    endpoint = endpoint_of(url, "vllm", "m")
    assert (endpoint.api, endpoint.root) == (api, root)


@pytest.mark.parametrize(
    "url",
    [
        "gpu:8000",
        "ftp://gpu",
        "http://",
        "http://[gpu",
        "http://gpu:x",
        "http://me:hunter2@gpu",
        "http://gpu?key=hunter2",
    ],
)
def test_an_address_that_cannot_be_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint_of(url, "vllm", "m")
    assert str(caught.value).startswith("url: expected")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["", " a", "a\r\nHost: other", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key: expected printable ASCII"):
        endpoint_of("http://gpu", "vllm", "m", SecretStr(key))


def test_the_key_is_never_shown() -> None:
    assert "hunter2" not in repr(endpoint_of("http://gpu", "vllm", "m", SecretStr("hunter2")))


def test_a_client_that_asked_nothing_has_nothing_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohttp.ClientSession", lambda **_: pytest.fail("a session was opened"))

    async def close() -> None:
        async with ServerClient(endpoint_of("http://gpu", "vllm", "m")):
            pass

    asyncio.run(close())


STREAM = (
    b': a comment\n\ndata: {"a":1}\n\ndata:{"b":\r\ndata: 2}\r\n\r\nerror: {"c":3}\nid: 7\n\n'
    b"data: [DONE]\n\ndata: x\n\n"
)
FOUND = [b'{"a":1}', b'{"b":\n2}', b'{"c":3}']


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_it_does_not_matter_where_chunks_end(cuts: list[int]) -> None:
    async def sent() -> AsyncIterator[bytes]:
        for begin, end in pairwise([0, *sorted(cuts), len(STREAM)]):
            yield STREAM[begin:end]

    async def gather() -> list[bytes]:
        return [data async for data in events(sent())]

    assert asyncio.run(gather()) == FOUND


PLAIN = Sampling(max_tokens=7, temperature=0.0)
CUT = Sampling(
    max_tokens=7,
    temperature=0.5,
    top_p=0.9,
    top_k=11,
    min_p=0.05,
    repetition_penalty=1.1,
    seed=3,
    stop=("END",),
    logit_bias=((5, -2.0),),
)
CHAT = parse_job(
    b'{"task": "code", "body": {"messages": [{"role": "system", "content": "Be brief."}]}}',
    Origin("test", "jobs.code", 0, 1),
    task="code",
)


def asked(
    kind: ServerKind, sampling: Sampling = PLAIN, *, stream: bool = False, is_chat: bool = False
) -> dict[str, Any]:
    return body_of(kind, "m", CHAT if is_chat else make_job("one two"), sampling, stream=stream)


def test_messages_take_the_place_of_a_prompt() -> None:
    body = asked("openai", is_chat=True)
    assert (body["messages"], "prompt" in body) == ([{"role": "system", "content": "Be brief."}], False)


def test_what_openai_defines_is_sent_to_all() -> None:
    assert asked("openai") == {
        "model": "m",
        "prompt": "one two",
        "max_tokens": 7,
        "temperature": 0.0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "n": 1,
        "stream": False,
    }
    assert asked("openai", stream=True)["stream_options"] == {"include_usage": True}


def test_defaults_of_the_server_never_apply() -> None:
    assert asked("vllm").items() >= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}.items()
    assert asked("sglang").items() >= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}.items()
    assert asked("llama_cpp").items() >= {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}.items()
    assert "repeat_last_n" not in asked("llama_cpp")  # of no use without a penalty, and newer builds take no -1
    assert "top_k" not in asked("tensorrt_llm")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama_cpp", "tensorrt_llm"])
def test_every_setting_is_passed_on(kind: ServerKind) -> None:
    body = asked(kind, CUT)
    assert body.items() >= {"temperature": 0.5, "top_p": 0.9, "top_k": 11, "min_p": 0.05, "seed": 3}.items()
    assert (body["stop"], body["logit_bias"]) == (["END"], {"5": -2.0})
    assert ("repeat_last_n" in body) == (kind == "llama_cpp")
    assert body["repeat_penalty" if kind == "llama_cpp" else "repetition_penalty"] == 1.1


def test_counts_are_asked_for_where_they_must_be() -> None:
    assert asked("vllm")["return_token_ids"] is True
    assert asked("sglang")["return_spec_tokens_details"] is True


def test_vllm_is_told_the_task_of_traffic_and_not_that_of_jobs_that_repeat_prompts() -> None:
    assert asked("vllm")["vllm_xargs"] == {"alphaloop_task": make_job("one two").task}
    probe = make_job("one two").model_copy(update={"purpose": Purpose.PROBE})
    assert "vllm_xargs" not in body_of("vllm", "m", probe, PLAIN, stream=False)
    assert "vllm_xargs" not in asked("sglang")
