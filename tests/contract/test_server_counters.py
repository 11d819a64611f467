"""A server that tells nothing of a request: its counters are evidence, over real connections to one in vLLM's form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from pydantic import SecretStr

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.engine import Generation, Sampling, SliceCounts
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import (
    Connection,
    InferenceServer,
    MetricsPage,
    ServedEngine,
    ask,
    engine_over,
    listening,
    whole,
)
from tests.fixtures.models import finish, lookup_decision, make_job
from worker.servers.client import ServerClient
from worker.servers.counters import Counters, ask_counters
from worker.servers.engine import ServerEngine
from worker.servers.http import endpoint_of

SAMPLING = Sampling(max_tokens=24, temperature=0.0)


@contextmanager
def silent_server() -> Iterator[tuple[ServerEngine, ServedEngine]]:
    """An engine over one server that drafts with k = 4 and tells nothing of a request."""
    server = ServedEngine(FakeEngine(), "lookup", 4, tells=False)
    with engine_over({"silent": server}) as engine:
        yield engine, server


def decode(engine: ServerEngine, server: ServedEngine, tasks: Sequence[str], *, behind: int = 0) -> list[Generation]:
    """A job of each task at once, to the end of all; in the order in which they ended."""
    server.is_held = True  # none ends before all have come
    for number, task in enumerate(tasks):
        job = make_job(f"complete function {behind + number}", behind + number).model_copy(update={"task": task})
        engine.admit(engine.prepare(job, SAMPLING), lookup_decision(4))
    while server.engine.load().num_running < len(tasks):
        assert not engine.step().failed
    server.is_held = False
    found = list(finish(engine).values())
    assert len(found) == len(tasks)
    return found


def slices(found: Sequence[Generation]) -> list[SliceCounts]:
    return [one.served.slice_counts for one in found if one.served and one.served.slice_counts]


def moved(server: ServedEngine, before: Counters) -> tuple[int, int, tuple[int, ...]]:
    """What the server itself says: tokens, drafted tokens, and those accepted by position."""
    now = Counters.of_page(server.metrics.text())
    accepts = tuple(after - then for then, after in zip(before.accepts, now.accepts, strict=True))
    return now.num_tokens - before.num_tokens, now.num_draft_tokens - before.num_draft_tokens, accepts


def settled(engine: ServerEngine, server: ServedEngine) -> None:
    """Ask until a slice is counted, so that the counters are known at the beginning of the next one."""
    for behind in range(100, 130):
        if slices(decode(engine, server, ["before"], behind=behind)):
            return
    raise AssertionError("no slice was ever counted")


def test_a_slice_of_one_task_has_the_servers_own_sums_and_is_told_with_the_job_that_ended_it() -> None:
    with silent_server() as (engine, server):
        settled(engine, server)
        before = Counters.of_page(server.metrics.text())
        found = decode(engine, server, ["code"] * 3)
        num_tokens, num_drafted, accepts = moved(server, before)
    (counted,) = slices(found)
    assert found[-1].served.slice_counts is counted
    assert found[-1].served.draft_revision == "vllm-0.32.0-counters", "evidence of its own kind"
    assert found[-1].served.num_rounds == counted.num_passes(24)
    assert (counted.num_requests, counted.num_tokens) == (3, num_tokens)
    assert (sum(counted.counts.proposed), counted.counts.accepts) == (num_drafted, accepts)
    assert num_drafted > 0
    for one in found:
        assert (one.is_counted, one.drafted, one.counts.num_tokens) == (False, (), 24)


def test_what_is_not_of_one_task_of_ours_is_credited_to_nobody() -> None:
    """Tasks that run together, another's requests with drafts and without, and a server that was started again."""
    drafted = AcceptanceCounts(10, 1, 0, (9,) * 4, (9, 5, 4, 3), (5, 4, 3, 2))
    with silent_server() as (engine, server):
        settled(engine, server)
        disturbances: list[tuple[list[str], Callable[[], object]]] = [
            (["code", "sql", "code"], lambda: None),
            (["code"], lambda: server.metrics.add(24, drafted)),
            (["code"], lambda: server.metrics.add(24, PREFILL)),
            (["code"], lambda: setattr(server, "metrics", MetricsPage())),
        ]
        for number, (tasks, happens) in enumerate(disturbances):
            happens()
            assert slices(decode(engine, server, tasks, behind=200 + 20 * number)) == []
            following = slices(decode(engine, server, ["sql", "sql"], behind=210 + 20 * number))
            assert len(following) == 1, "the next slice is whole again"


def test_a_page_that_is_missing_costs_no_job(caplog: pytest.LogCaptureFixture) -> None:
    with silent_server() as (engine, server):
        settled(engine, server)
        server.metrics.is_missing = True
        for number in range(2):
            assert slices(decode(engine, server, ["code"], behind=number)) == []
        told = [record for record in caplog.records if "its counters were not read" in record.getMessage()]
        assert len(told) == 1, "said once"
        server.metrics.is_missing = False
        settled(engine, server)


def test_a_server_that_tells_of_requests_is_not_asked_for_counters() -> None:
    """Without `metrics_url` nothing is read."""
    server = ServedEngine(FakeEngine(), "lookup", 4)
    paths: list[str] = []
    answer = server.__call__

    async def noted(connection: Connection) -> None:
        paths.append(connection.asked.path)
        await answer(connection)

    ask(noted, lambda client: client.complete(make_job("one two"), SAMPLING), "vllm", model="fake")
    assert paths == ["/v1/completions"]
    with engine_over({"telling": server}) as engine:
        (found,) = decode(engine, server, ["code"])
    assert (found.is_counted, found.served.slice_counts) == (True, None)
    assert found.served.draft_revision == "vllm-0.32.0"


PAGE = MetricsPage(num_requests=2, num_tokens=9).text().encode()


def read(metrics_url: Callable[[InferenceServer], str], page: bytes = PAGE) -> tuple[Counters, InferenceServer]:

    async def run() -> tuple[Counters, InferenceServer]:
        async with listening(whole(page)) as server:
            endpoint = endpoint_of(
                server.url,
                "openai",
                "fake",
                SecretStr("hunter2"),
                metrics_url=metrics_url(server),
                drafter="ngram",
                num_draft_tokens=4,
            )
            async with ServerClient(endpoint) as client:
                return await ask_counters(client), server

    return asyncio.run(run())


def test_the_servers_own_page_sees_its_key_and_no_other_page_does() -> None:
    found, server = read(lambda one: one.url.removesuffix("/v1") + "/metrics")
    assert (found.num_requests, found.num_tokens) == (2, 9)
    assert server.asked[0].headers["authorization"] == "Bearer hunter2"
    found, server = read(lambda one: one.url.removesuffix("/v1").replace("127.0.0.1", "localhost") + "/metrics")
    assert (found.num_tokens, "authorization" in server.asked[0].headers) == (9, False)
