"""An endpoint's address, key and limits; events however bytes are cut; bodies that leave nothing to defaults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from alphaloop.errors import ConfigError
from worker.servers.client import ServerClient
from worker.servers.http import endpoint_of, events


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
