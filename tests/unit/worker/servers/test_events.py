"""Server-sent events come out as they went in, however the bytes are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import ReplyInvalid
from worker.servers.http import events

STREAM = (
    b': a comment\n\ndata: {"a":1}\n\ndata:{"b":\r\ndata: 2}\r\n\r\nerror: {"c":3}\nid: 7\n\n'
    b"data: [DONE]\n\ndata: x\n\n"
)
FOUND = [b'{"a":1}', b'{"b":\n2}', b'{"c":3}']


def read(chunks: list[bytes], max_event_bytes: int = 1024) -> list[bytes]:
    async def sent() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def gather() -> list[bytes]:
        return [data async for data in events(sent(), max_event_bytes=max_event_bytes)]

    return asyncio.run(gather())


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_it_does_not_matter_where_chunks_end(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[a:b] for a, b in pairwise(places)]) == FOUND


def test_an_event_that_ends_with_the_stream_is_left_out() -> None:
    assert read([b'data: {"a":1}\n\ndata: {"b"']) == [b'{"a":1}']


@pytest.mark.parametrize("chunks", [[b"data: " + b"x" * 64], [b"data: " + b"x" * 20 + b"\n"] * 3])
def test_an_event_larger_than_the_limit_is_refused(chunks: list[bytes]) -> None:
    with pytest.raises(ReplyInvalid, match="expected events of at most 32 bytes"):
        read(chunks, max_event_bytes=32)
