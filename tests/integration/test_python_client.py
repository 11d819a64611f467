"""The Python client on a real broker: with workers, with answers by the test's hand, and with a broker that refuses."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from alphaloop.client import AsyncClient, Batch, Client, Job, Piece, Result, ResultsMissing, SubmissionStopped
from alphaloop.client import sync as client_module
from alphaloop.errors import InvalidField, MessageTooLarge, UnknownName, UnknownTask
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS, ensure_topics
from alphaloop.messages import Failure, Status
from alphaloop.settings import KafkaSettings, Settings
from tests.fakes import FakeEngine
from tests.fixtures.doomed_worker import doomed_worker
from tests.fixtures.messages import succeeded
from tests.fixtures.responder import REFUSED, SILENT, Responder
from tests.fixtures.worker import WAIT_S, Streamed, changed, running_worker, until

pytestmark = pytest.mark.kafka


@pytest.fixture
def responder(kafka_settings: KafkaSettings, fresh_prefix: str) -> Iterator[Responder]:
    started = Responder(kafka_settings, fresh_prefix)
    yield started
    started.close()


@pytest.fixture
def client(kafka_settings: KafkaSettings, fresh_prefix: str) -> Iterator[Client]:
    """Of an environment that names no task: those with a topic are known."""
    ensure_topics(kafka_settings, [fresh_prefix])
    with Client(Settings(kafka=kafka_settings)) as one:
        yield one


def results(client: Client, batch: Batch) -> list[Result]:
    return list(client.results(batch, timeout_s=WAIT_S))


def asked(task: str, *prompts: str) -> list[dict[str, Any]]:
    return [{"task": task, "prompt": prompt} for prompt in prompts]


def test_every_job_has_one_result_in_its_form(client: Client, responder: Responder, fresh_prefix: str) -> None:
    """The responder sends each result twice."""
    raw = {"task": fresh_prefix, "custom_id": "mine", "body": {"prompt": "raw"}}
    whole = Job.model_validate({"job_id": f"{fresh_prefix}-1", "task": fresh_prefix, "prompt": "whole"})
    batch = client.submit([*asked(fresh_prefix, "one", REFUSED), raw, whole], batch_id="monday")
    found = {result.sent_job_id: result for result in results(client, batch)}
    assert found.keys() == set(batch.job_ids)
    one, refused, own, last = (found[job_id] for job_id in batch.job_ids)
    assert (one.text, own.custom_id, last.job_id) == ("re: one", "mine", f"{fresh_prefix}-1")
    assert (refused.status, refused.response) == (Status.REFUSED, None)
    assert refused.error is not None
    assert refused.error.code == "invalid_field"
    assert {job.batch_id for job in responder.jobs} == {"monday"}
    assert Counter(result.sent_job_id for result in results(client, batch)) == dict.fromkeys(batch.job_ids, 1)


def test_another_process_goes_on_with_a_batch(
    client: Client, responder: Responder, kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    began = datetime.now(UTC) - timedelta(seconds=1)
    batch = client.submit(asked(fresh_prefix, "one", "two"))
    assert len(results(client, batch)) == 2
    with Client(Settings(kafka=kafka_settings)) as other:
        again = results(other, Batch.from_json(batch.to_json()))
        assert {one.text for one in again} == {"re: one", "re: two"}
        since = results(other, other.sent_before(batch.job_ids, since=began))
        assert {one.text for one in since} == {one.text for one in again}
        late = other.sent_before(batch.job_ids)
        with pytest.raises(ResultsMissing, match="2 of 2 jobs") as caught:
            list(other.results(late, timeout_s=0.5))
    assert caught.value.job_ids == set(batch.job_ids)


def test_the_time_is_up_for_those_without_a_result(client: Client, responder: Responder, fresh_prefix: str) -> None:
    batch = client.submit(asked(fresh_prefix, SILENT, "one"))
    found: list[str | None] = []
    with pytest.raises(ResultsMissing, match="1 of 2 jobs had no result within") as caught:
        list(client.results(batch, timeout_s=2))
    assert caught.value.job_ids == {batch.job_ids[0]}
    arriving = client.results(batch, alive=ending(found))
    found.append(next(arriving).text)
    with pytest.raises(LookupError):
        next(arriving)


def ending(found: list[Any]) -> Callable[[], None]:
    """Raises once something was found."""

    def alive() -> None:
        if found:
            raise LookupError

    return alive


def test_a_sequence_is_sent_whole_or_not_at_all(client: Client, responder: Responder, fresh_prefix: str) -> None:
    wrong = {"task": fresh_prefix, "prompt": "p", "temperature": 3}
    with pytest.raises(InvalidField, match="found 3") as caught:
        client.submit([*asked(fresh_prefix, "one"), wrong])
    assert caught.value.field == "jobs[1].temperature"
    with pytest.raises(UnknownTask, match=r"no topic 'jobs\.nobody-s'") as unknown:
        client.submit([*asked(fresh_prefix, "one"), *asked("nobody-s", "two")])
    assert unknown.value.field == "jobs[1].task"
    assert fresh_prefix in (unknown.value.hint or "")
    with pytest.raises(SubmissionStopped, match=r"1 job went to Kafka, then jobs\[1\].temperature") as stopped:
        client.submit(iter([*asked(fresh_prefix, "two"), wrong, *asked(fresh_prefix, "three")]))
    (result,) = results(client, stopped.value.batch)
    assert result.text == "re: two"
    assert len(responder.jobs) == 1


def test_a_job_that_kafka_refuses_is_named_by_its_reason(client: Client, fresh_prefix: str) -> None:
    large = Job.model_validate({"job_id": "large", "task": fresh_prefix, "prompt": "x" * (6 << 20)})
    with pytest.raises(MessageTooLarge):
        client.submit(large)
    with pytest.raises(SubmissionStopped) as stopped:
        client.submit([*asked(fresh_prefix, "small"), large])
    assert len(stopped.value.batch) == 1
    assert isinstance(stopped.value.__cause__, MessageTooLarge)
    assert len(client.submit(asked(fresh_prefix, "next"))) == 1


def test_pieces_come_in_order_and_then_the_result(
    client: Client, kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    streamed, names = Streamed(kafka_settings), [f"{fresh_prefix}-{number}" for number in range(2)]
    batch = client.submit([{"job_id": name, "task": fresh_prefix, "prompt": "p"} for name in names], stream=True)
    for attempt, seq, text in ((1, 1, "ver"), (1, 0, "A ri"), (1, 1, "ver"), (2, 0, "A ri"), (2, 1, "ng")):
        streamed.text(names[0], attempt, seq, text)
    arriving = client.stream(batch.only((names[0],)), timeout_s=WAIT_S)
    pieces = [next(arriving) for _ in range(2)]
    assert pieces == [Piece(names[0], "A river"), Piece(names[0], "A ring", begins_again=True)]
    with closing(Producer(kafka_settings)) as producer:
        for name, text in zip(names, ("A ring.", "not streamed"), strict=True):
            producer.send(RESULTS, key=name.encode(), value=succeeded(name, text).encode())
        failed = {"status": Status.FAILED, "text": None, "error": Failure(code="why", message="because")}
        late = succeeded(names[0], "").model_copy(update=failed)
        producer.send(RESULTS, key=names[0].encode(), value=late.encode())
        producer.flush(WAIT_S)
    assert list(arriving) == [Piece(names[0], "."), succeeded(names[0], "A ring.")]
    both = list(client.stream(batch.only((names[1],)), timeout_s=WAIT_S))
    assert both == [Piece(names[1], "not streamed"), succeeded(names[1], "not streamed")]


def test_two_clients_at_once_hear_of_their_own_jobs(
    kafka_settings: KafkaSettings, responder: Responder, fresh_prefix: str
) -> None:
    with Client(Settings(kafka=kafka_settings)) as shared, Client(Settings(kafka=kafka_settings)) as other:
        found: dict[int, list[str]] = {}

        def work(number: int, client: Client) -> None:
            prompts = [f"{number}-{i}" for i in range(25)]
            batch = client.submit(asked(fresh_prefix, *prompts))
            found[number] = sorted(str(one.text) for one in client.results(batch, timeout_s=WAIT_S))

        threads = [threading.Thread(target=work, args=(n, one)) for n, one in enumerate((shared, shared, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert found == {n: sorted(f"re: {n}-{i}" for i in range(25)) for n in range(3)}


@pytest.mark.timeout(400)
def test_ten_thousand_jobs_are_not_held(
    client: Client, responder: Responder, fresh_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MB of prompts: fewer than 300 kB wait for Kafka, and Python holds little beside the ids."""
    monkeypatch.setattr(client_module, "_MOST_PENDING_BYTES", 256 << 10)
    pending: list[int] = []
    add = client_module._Deliveries.add

    def noting(deliveries: Any, num_bytes: int) -> None:
        add(deliveries, num_bytes)
        pending.append(deliveries.num_bytes)

    monkeypatch.setattr(client_module._Deliveries, "add", noting)
    responder.keeps_jobs = False
    client.submit(asked(fresh_prefix, "first"))
    tracemalloc.start()
    try:
        batch = client.submit({"task": fresh_prefix, "prompt": f"{n} " + "x" * 4096} for n in range(10_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(pending) < 300 << 10
    assert peak < 12 << 20
    assert sum(1 for _ in client.results(batch, timeout_s=150)) == 10_000


def test_the_async_client_does_the_same(kafka_settings: KafkaSettings, responder: Responder, fresh_prefix: str) -> None:
    async def work() -> None:
        async with AsyncClient(Settings(kafka=kafka_settings)) as client:

            async def one(number: int) -> list[str | None]:
                batch = await client.submit(asked(fresh_prefix, f"{number}-a", f"{number}-b"))
                return sorted([result.text async for result in client.results(batch, timeout_s=WAIT_S)])

            found = await asyncio.gather(*(one(number) for number in range(4)))
            assert found == [[f"re: {number}-a", f"re: {number}-b"] for number in range(4)]
            arrived = [one async for one in client.stream(asked(fresh_prefix, "s")[0], timeout_s=WAIT_S)]
            assert [one.text for one in arrived] == ["re: s", "re: s"]
            assert isinstance(arrived[-1], Result)
            silent = await client.submit(asked(fresh_prefix, SILENT, SILENT))
            with pytest.raises(ResultsMissing):
                [_ async for _ in client.results(silent, timeout_s=0.5)]
            # Cancelled while it waits, and left while it could go on.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    [_ async for _ in client.results(silent)]
            async for _ in client.results(await client.submit(asked(fresh_prefix, "x", "y")), timeout_s=WAIT_S):
                break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await client.submit(endless(fresh_prefix))

    asyncio.run(work())
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("alphaloop-client")], "all end")


def endless(task: str) -> Iterator[dict[str, Any]]:
    while True:
        yield {"task": task, "prompt": SILENT}


@pytest.mark.postgres
def test_a_worker_ends_every_job_and_the_client_counts_each(worker_settings: Settings) -> None:
    """All five statuses, a job that is sent again, and one whose job_id is another's."""
    jobs: list[dict[str, Any]] = [
        {"job_id": "good", "task": "code", "prompt": "complete this", "max_tokens": 4},
        {"job_id": "failed", "task": "code", "prompt": "complete that", "max_tokens": 4},
        {"job_id": "late", "task": "code", "prompt": "p", "deadline": datetime.now(UTC) - timedelta(hours=1)},
        {"job_id": "refused", "task": "code", "prompt": "p", "body": None, "model": "another"},
        {"job_id": "unwanted", "task": "chat", "prompt": "p"},
    ]
    with Client(worker_settings) as client:
        batch = client.submit(jobs)
        client.cancel("unwanted")
        engine = FailingEngine()
        with running_worker(worker_settings, engine) as worker:
            engine.are_cancelled = worker.worker.leases.cancelled
            found = {one.sent_job_id: one.status.value for one in results(client, batch)}
            assert found == {
                "good": "succeeded",
                "failed": "failed",
                "late": "expired",
                "refused": "refused",
                "unwanted": "cancelled",
            }
            client.cancel(["good", "refused"])  # they have ended, and keep their outcomes
            with pytest.raises(UnknownName, match=r"no job nosuch: none waits in Kafka, and `results` has none"):
                client.cancel(["good", "nosuch"])
            again = client.submit(jobs[:1])
            (result,) = results(client, again)
            assert result.status is Status.SUCCEEDED, "the recorded outcome"
            (conflict,) = results(client, client.submit({**jobs[0], "prompt": "something else"}))
    assert (conflict.status, conflict.sent_job_id) == (Status.REFUSED, "good")
    assert conflict.job_id != "good"


class FailingEngine(FakeEngine):
    """Fails with the job of that name, and takes no step with the unwanted one before it is cancelled."""

    are_cancelled: Callable[[], Any] | None = None

    def step(self) -> Any:
        if "unwanted" in self.running:
            until(lambda: self.are_cancelled is not None and bool(self.are_cancelled()), "it is cancelled")
        if "failed" in self.running:
            self._failing = frozenset({self.num_steps})
        return super().step()


@pytest.mark.postgres
def test_a_worker_that_is_killed_amid_a_batch_costs_no_result(worker_settings: Settings) -> None:
    settings = changed(worker_settings, kafka={"session_timeout_ms": 1500}, worker={"lease_s": 1.0})
    names = [f"job-{number}" for number in range(12)]
    with Client(settings) as client:
        batch = client.submit(
            [{"job_id": name, "task": "code", "prompt": f"tell story {name}", "max_tokens": 6} for name in names]
        )
        arriving, found = client.results(batch, timeout_s=WAIT_S), list[Result]()
        with doomed_worker(settings, "job-7") as process:
            process.join(WAIT_S)
        with running_worker(settings, FakeEngine()):
            found += arriving
    assert sorted(one.job_id for one in found) == sorted(names)
    assert {one.status for one in found} == {Status.SUCCEEDED}
