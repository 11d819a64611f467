"""The event loop's thread: calls keep their order, errors come back, and its end ends everything."""

from __future__ import annotations

import asyncio

import pytest

from worker.servers.engine import LoopThread


def test_calls_keep_their_order_and_results_come_back() -> None:
    thread = LoopThread("test")
    seen: list[int] = []
    for number in range(100):
        thread.call(lambda number=number: seen.append(number))

    async def count() -> int:
        return len(seen)

    assert thread.wait_for(count()) == 100
    assert seen == sorted(seen)
    thread.close()


def test_what_a_coroutine_raises_reaches_the_caller() -> None:
    thread = LoopThread("test")

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        thread.wait_for(fail())
    thread.close()


def test_its_end_cancels_what_runs_and_later_calls_do_nothing() -> None:
    thread = LoopThread("test")
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def begin() -> None:
        thread.keep(forever())
        await asyncio.sleep(0)

    thread.wait_for(begin())
    thread.close()
    assert ended == ["cancelled"]
    thread.call(lambda: ended.append("never"))
    assert ended == ["cancelled"]


def test_what_is_kept_can_be_ended_before_what_it_uses_is_closed() -> None:
    thread = LoopThread("test")
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("kept")

    async def end() -> None:
        thread.keep(forever())
        await asyncio.sleep(0)
        await thread.end_kept()
        ended.append("closed")

    thread.wait_for(end())
    thread.close()
    assert ended == ["kept", "closed"]
