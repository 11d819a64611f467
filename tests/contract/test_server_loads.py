"""Servers tell how many requests they have, over real connections: each kind on its own page, and the engine's use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alphaloop.engine import Generation, Sampling
from alphaloop.errors import AlphaloopError, ReplyInvalid, RequestRefused, ServerFailed
from alphaloop.server_identity import ServerKind
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import (
    Answer,
    InferenceServer,
    MetricsPage,
    ServedEngine,
    ask,
    engine_over,
    whole,
)
from tests.fixtures.models import VANILLA, finish, make_job
from worker.servers.client import ServerClient
from worker.servers.counters import LoadWatch, ask_present
from worker.servers.engine import ServerEngine
from worker.servers.load import Present

#: Three requests run at each of two engines, and four wait at the second.
ENGINE_0 = MetricsPage(num_strangers=2).text(1)
ENGINE_1 = ENGINE_0.replace('engine="0"', 'engine="1"')
VLLM = (ENGINE_0 + ENGINE_1.replace('waiting{engine="1",model_name="model"} 0.0', 'waiting{engine="1"} 4.0')).encode()
LLAMA_CPP = b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 8\nllamacpp:requests_deferred 2\n"
RANK = {"dp_rank": 0, "num_running_reqs": 6, "num_waiting_reqs": 1, "token_usage": 0.01}
SGLANG = {"version": "0.5.23", "loads": [RANK, {**RANK, "dp_rank": 1, "num_running_reqs": 2}]}
SAMPLING = Sampling(max_tokens=24, temperature=0.0)
#: A reading may fall between two requests of ours, or into one: it is of others to within one, and rounding.
WITHIN = 1.01


def asked(kind: ServerKind, answer: Answer) -> tuple[Present | None, InferenceServer]:
    return ask(answer, ask_present, kind)


@pytest.mark.parametrize(
    ("kind", "answer", "path", "present"),
    [
        ("vllm", whole(VLLM, content_type="text/plain; version=0.0.4"), "/metrics", Present(6, 4)),
        ("llama_cpp", whole(LLAMA_CPP, content_type="text/plain; version=0.0.4"), "/metrics", Present(8, 2)),
        ("sglang", whole(SGLANG), "/v1/loads?include=core", Present(8, 2)),
    ],
)
def test_each_kind_is_asked_on_its_own_page_with_its_key(
    kind: ServerKind, answer: Answer, path: str, present: Present
) -> None:
    found, server = asked(kind, answer)
    assert found == present
    assert [(asked.method, asked.path) for asked in server.asked] == [("GET", path)]
    assert server.asked[0].headers["authorization"] == "Bearer hunter2"


def test_a_server_of_another_kind_is_not_asked() -> None:
    found, server = asked("openai", whole(VLLM))
    assert (found, server.asked) == (None, [])


@pytest.mark.parametrize(
    ("kind", "answer", "error"),
    [
        ("sglang", whole({"detail": "Not Found"}, 404), RequestRefused),
        ("llama_cpp", whole({"error": {"code": 501, "message": "not supported", "type": "x"}}, 501), ServerFailed),
        ("vllm", whole(b"# stats are off\n"), ReplyInvalid),
        ("vllm", whole(b"vllm:num_requests_running 1\n" + b"#" * (9 << 20)), ReplyInvalid),
    ],
    ids=["no such page", "turned off", "without gauges", "without end"],
)
def test_a_server_that_does_not_tell_says_so_in_an_error(
    kind: ServerKind, answer: Answer, error: type[AlphaloopError]
) -> None:
    with pytest.raises(error):
        asked(kind, answer)


def decode(engine: ServerEngine, number: int) -> Generation:
    (found,) = finish(engine, [(make_job(f"complete function {number}", number), SAMPLING, VANILLA)]).values()
    return found


def decode_until_the_load_is_known(engine: ServerEngine) -> int:
    for number in range(300):
        decode(engine, number)
        if all(one.is_whole_load_known for one in engine.endpoints()):
            return number
    raise AssertionError("the load was never known")


def test_a_request_is_told_with_the_load_of_the_whole_fleet() -> None:
    plain = ServedEngine(FakeEngine(), round_s=0.001, metrics=MetricsPage(num_strangers=2))
    drafting = ServedEngine(FakeEngine(), "lookup", 4, 0.001, metrics=MetricsPage(num_strangers=5))
    with engine_over({"plain": plain, "speculative": drafting}) as engine:
        num_before = decode_until_the_load_is_known(engine)
        found = decode(engine, num_before + 1)
        served = {one.name: one.num_others for one in engine.endpoints()}
    assert found.served.num_beside == pytest.approx(1.0), "costs are learned over our own"
    load = found.served.load
    assert load.is_whole
    assert load.num_beside == pytest.approx(1 + 2, abs=WITHIN)
    assert load.num_elsewhere == pytest.approx(5, abs=0.5)
    assert served["speculative"] == 5.0


def test_servers_are_not_asked_any_more_when_an_engine_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    close = ServerClient.__aexit__

    async def watch(watch: LoadWatch) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("not asked any more")

    async def closing(client: ServerClient, *error: Any) -> None:
        said.append("closed")
        await close(client, *error)

    monkeypatch.setattr(LoadWatch, "run", watch)
    with engine_over({"plain": ServedEngine(FakeEngine())}) as engine:
        decode(engine, 0)
        monkeypatch.setattr(ServerClient, "__aexit__", closing)
    assert said == ["not asked any more", "closed"]
