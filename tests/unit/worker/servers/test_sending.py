"""Which jobs servers may be sent, what the fleet is asked for those in line, and how a job goes on after a failure.

From settings to the engine, and the thread of its event loop, which ends everything when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import AnswerPiece, PreparedJob, Sampling
from alphaloop.errors import (
    AlphaloopError,
    ConfigError,
    InvalidField,
    ReplyCut,
    ServerError,
    ServerUnavailable,
    ServerUnreachable,
)
from alphaloop.messages import Body, Job
from alphaloop.server_identity import ServerKind
from alphaloop.settings import ModelSettings, TaskSettings
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import Connection, ServedEngine, serving
from tests.fixtures.models import make_job
from tests.fixtures.simulated import Clock, server_of
from worker.intake.validation import sampling_of
from worker.servers.engine import LoopThread, open_server_engine
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import endpoint_of
from worker.servers.sending import Arrival, InLine, Sending, ServerRequest, TokenEstimate, prepare


class Servers:
    """Two servers that die with every request, after its first word; a test finds them gone, and they come back."""

    endpoint = endpoint_of("http://gpu", "vllm", "m")

    must_stream = False

    def __init__(self, num_requests: int) -> None:
        self.clock = Clock()
        endpoints = [server_of(name, None, 0, num_requests) for name in ("s0", "s1")]
        self.fleet = Fleet(endpoints, clock=self.clock, rng=Random(0))
        self.events: list[Arrival] = []
        self.lines: list[InLine] = []
        self.sending = Sending(
            cast(Any, {"s0": self, "s1": self}),
            self.fleet,
            cast(Any, self),
            TokenEstimate(),
            tell=self.told,
            clock=self.clock,
        )

    def told(self, arrival: Arrival | None) -> None:
        if arrival is None:
            self.lines.append(self.sending.in_line)
        else:
            self.events.append(arrival)

    async def complete(
        self, job: Job, sampling: Sampling, *, on_piece: Callable[[AnswerPiece], None], **asked: object
    ) -> None:
        self.clock.pass_s(1.0)
        on_piece(AnswerPiece("amber "))
        raise ReplyCut

    async def of(self, name: str) -> AlphaloopError | None:
        self.fleet.tested(name, ServerUnreachable())
        return ServerUnreachable()


def request(
    number: int, *, stream: bool = False, is_bound: bool = False, barred: frozenset[str] = frozenset()
) -> ServerRequest:
    job = Job(job_id=f"job-{number}", task="code", body=Body(prompt="one", stream=stream))
    prepared = PreparedJob(job, (), Sampling(4, 0.0))
    return ServerRequest(prepared, None, is_bound, admitted_at=0.0, barred=barred, max_tokens=4)


def test_a_stream_that_ends_with_its_server_is_a_suspect_when_it_comes_back() -> None:
    async def streams() -> list[bool]:
        servers, was_alone = Servers(4), []
        for _ in range(2):
            streamed = request(1, stream=True)
            servers.sending.put(streamed)
            await streamed.task
            assert servers.events[-1].what is None
            for _ in range(3):
                servers.clock.pass_s(31.0)
                for name in servers.fleet.due_tests():
                    servers.fleet.tested(name, None)
            was_alone.append(streamed.must_be_alone)
        again = request(1, stream=True)
        servers.sending.put(again)
        servers.sending.drop_all()
        return [*was_alone, again.must_be_alone]

    assert asyncio.run(streams()) == [False, False, True]


def test_the_fleet_is_asked_once_for_requests_that_are_alike(monkeypatch: Any) -> None:
    servers = Servers(1)
    servers.fleet.began("s0")
    servers.fleet.began("s1")
    asked = []
    choose = servers.fleet.choose
    monkeypatch.setattr(servers.fleet, "choose", lambda *args, **named: asked.append(args) or choose(*args, **named))
    for number in range(50):
        servers.sending.put(request(number))
    assert len(asked) == 50, "once for each that came, not for each that waits"


def test_what_waits_for_some_endpoints_alone_is_told_with_whether_these_are_away() -> None:
    servers = Servers(1)
    flights = [servers.fleet.began("s0"), servers.fleet.began("s1")]
    for one in (request(1, is_bound=True), request(2), request(3, barred=frozenset({"s1"}))):
        servers.sending.put(one)
    assert servers.lines[-1] == InLine(frozenset({"job-1", "job-3"}), frozenset())
    servers.fleet.failed("s0", ServerUnreachable())
    servers.sending.put(request(4))
    assert servers.lines[-1] == InLine(frozenset({"job-1", "job-3"}), frozenset({"job-3"}))
    assert len(servers.lines) == 3, "told where it is other than before"
    assert len(flights) == 2


def test_a_request_that_is_dropped_before_its_first_step_gives_its_place_back() -> None:
    async def drops() -> tuple[int, int, list[Arrival]]:
        servers = Servers(1)
        requests = [request(number) for number in range(2)]
        for one in requests:
            servers.sending.put(one)
        tasks = [one.task for one in requests if one.task is not None]
        servers.sending.drop_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks), servers.fleet.num_in_flight, servers.events

    assert asyncio.run(drops()) == (2, 0, [])


NGRAM = DrafterState("ngram", "vllm-0.32.0", 4, least_draft_tokens=4)


def server(kind: ServerKind, drafter: DrafterState | None = None) -> InferenceServer:
    return InferenceServer(kind, endpoint_of("http://localhost:1/v1", kind, "m"), drafter, 4, 512)


def prepared(asked: dict[str, Any], *servers: InferenceServer) -> int:
    job = make_job("x" * 400)
    job = job.model_copy(update={"body": Body(prompt=job.body.prompt, **asked)})
    sampling = sampling_of(job, TaskSettings(temperature=1.0))
    return prepare(job, sampling, servers, limit=512, tokens=TokenEstimate()).num_prompt_tokens


def test_a_job_is_refused_only_where_no_server_can_follow_its_settings() -> None:
    biased = {"logit_bias": {"5": 1.0}}
    with pytest.raises(InvalidField, match=r"body\.logit_bias"):
        prepared(biased, server("vllm", NGRAM))
    assert prepared(biased, server("vllm", NGRAM), server("vllm")) == 100
    cut = {"top_k": 5}
    with pytest.raises(InvalidField, match=r"body\.top_k"):
        prepared(cut, server("openai"))
    assert prepared(cut, server("openai"), server("llama_cpp")) == 100


def test_an_empty_prompt_is_refused_before_it_is_sent() -> None:
    job = make_job("x")
    empty = job.model_copy(update={"body": job.body.model_copy(update={"prompt": ""})})
    with pytest.raises(InvalidField, match=r"body\.prompt"):
        prepare(empty, Sampling(max_tokens=8, temperature=0.0), [server("vllm")], limit=512, tokens=TokenEstimate())


def test_no_more_tokens_are_asked_for_than_a_context_holds() -> None:
    job = prepare(
        make_job("x"), Sampling(max_tokens=9999, temperature=0.0), [server("vllm")], limit=512, tokens=TokenEstimate()
    )
    assert job.sampling.max_tokens == 511


@settings(max_examples=15)
@given(st.floats(1.0, 12.0), st.integers(20, 2000))
def test_the_estimate_comes_to_what_the_server_counts(bytes_per_token: float, num_bytes: int) -> None:
    tokens, job = TokenEstimate(), make_job("x" * num_bytes)
    truth = max(1, round(num_bytes / bytes_per_token))
    for _ in range(4000):
        tokens.learn(job, truth)
    assert tokens.of(job) == pytest.approx(truth, rel=0.1, abs=2)


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
    with pytest.raises(ServerUnavailable, match=rf"models\.endpoints\.away at {AWAY}: no connection"):
        open_server_engine(models(away={"url": AWAY}))


def test_a_server_that_dies_while_the_worker_starts_is_named_with_its_address() -> None:
    served = ServedEngine(FakeEngine())

    async def dying(connection: Connection) -> None:
        if "completions" in connection.asked.path:
            connection.reset()
        else:
            await served(connection)

    with serving(dying) as server, pytest.raises(ServerError) as died:
        open_server_engine(models(plain={"url": server.url, "kind": "vllm"}))
    assert died.value.message.startswith(f"models.endpoints.plain at {server.url}: ")


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
