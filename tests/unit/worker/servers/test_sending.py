"""Which jobs servers may be sent, what the fleet is asked for those in line, and how a job goes on after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import AlphaloopError, InvalidField, ReplyCut, ServerUnreachable
from alphaloop.messages import Body, Job
from alphaloop.server_identity import ServerKind
from tests.fixtures.models import make_job
from tests.fixtures.simulated import Clock, server_of
from worker.engine import PreparedJob, Sampling
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
        self, job: Job, sampling: Sampling, *, on_text: Callable[[str], None], num_draft_tokens: int | None
    ) -> None:
        self.clock.pass_s(1.0)
        on_text("amber ")
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


def prepared(sampling: Sampling, *servers: InferenceServer) -> int:
    return prepare(make_job("x" * 400), sampling, servers, limit=512, tokens=TokenEstimate()).num_prompt_tokens


def test_a_job_is_refused_only_where_no_server_can_follow_its_settings() -> None:
    biased = Sampling(max_tokens=8, temperature=1.0, logit_bias=((5, 1.0),))
    with pytest.raises(InvalidField, match=r"body\.logit_bias"):
        prepared(biased, server("vllm", NGRAM))
    assert prepared(biased, server("vllm", NGRAM), server("vllm")) == 100
    cut = Sampling(max_tokens=8, temperature=1.0, top_k=5)
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
