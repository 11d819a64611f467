"""From settings to the engine, and the thread of its event loop, which ends everything when it ends."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from alphaloop.errors import ConfigError, ServerUnavailable
from alphaloop.settings import ModelSettings
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import ServedEngine, serving
from worker.servers.engine import LoopThread, open_server_engine

AWAY = "http://127.0.0.1:9/v1"  # the discard port: nobody listens


def models(**endpoints: dict[str, Any]) -> ModelSettings:
    named = {name: {"kind": "vllm", **one} for name, one in endpoints.items()}
    return ModelSettings.model_validate({"target": {"engine": "server", "name": "mine"}, "endpoints": named})


def test_the_engine_is_named_after_its_servers_and_keeps_the_shortest_context() -> None:
    short, long = ServedEngine(FakeEngine(context_length=512)), ServedEngine(FakeEngine(context_length=2048))
    with serving(short) as one, serving(long) as other:
        speculative = {"url": other.url, "drafter": "ngram", "num_draft_tokens": 3, "max_requests": 5}
        with closing(open_server_engine(models(plain={"url": one.url}, speculative=speculative))) as engine:
            assert engine.identity.engine == "vllm-0.32.0"
            assert (engine.identity.target, engine.identity.context_length) == ("mine", 512)
            (drafter,) = engine.drafters
            assert (drafter.name, drafter.revision) == ("ngram", "vllm-0.32.0")
            assert (drafter.least_draft_tokens, drafter.max_draft_tokens) == (3, 3)
            assert (drafter.num_endpoints, drafter.num_vanilla_endpoints) == (1, 1)
            assert engine.load().num_slots == 16 + 5


def test_an_endpoint_that_is_away_is_waited_for_where_its_model_is_named() -> None:
    with serving(ServedEngine(FakeEngine())) as server:
        both = models(plain={"url": server.url}, away={"url": AWAY, "model": "fake"})
        with closing(open_server_engine(both)) as engine:
            assert {status.name: status.state for status in engine.endpoints()} == {"plain": "up", "away": "down"}
            assert engine.unavailable() is None


def test_without_any_server_the_start_waits() -> None:
    with pytest.raises(ServerUnavailable, match="no connection"):
        open_server_engine(models(away={"url": AWAY}))


def test_a_model_that_is_not_served_is_a_mistake_of_the_settings() -> None:
    with (
        serving(ServedEngine(FakeEngine())) as server,
        pytest.raises(ConfigError, match=r"models\.endpoints\.plain: .*'another' .* found fake"),
    ):
        open_server_engine(models(plain={"url": server.url, "model": "another"}))


def test_its_end_cancels_what_runs_and_later_calls_do_nothing() -> None:
    thread = LoopThread("test")
    ended: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def begin() -> None:
        tasks.append(asyncio.create_task(forever()))
        await asyncio.sleep(0)

    thread.wait_for(begin())
    thread.close()
    assert ended == ["cancelled"]
    thread.call(lambda: ended.append("never"))
    assert ended == ["cancelled"]
