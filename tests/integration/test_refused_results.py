"""Results, chunks and dead letters that a real broker refuses: none is retried for ever, none holds up another."""

from __future__ import annotations

import json
import random
from contextlib import closing

import pytest
from sqlalchemy import text

from alphaloop.errors import DeliveryFailed
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS, TOKENS, list_topics
from alphaloop.messages import Result, Status
from alphaloop.messages.dead_letter import SHORTENED
from alphaloop.settings import KafkaSettings, Settings
from alphaloop.store.database import Database
from alphaloop.store.outcomes import OutcomeStore
from tests.fakes import FakeEngine, VerboseEngine
from tests.fixtures.broker import Operator
from tests.fixtures.runs import claim, num_pending, outcome
from tests.fixtures.worker import WAIT_S, Client, RunningWorker, by_key, headers_of, kafka_extra, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

LIMIT = 2000  #: bytes of a message on `results`: enough for the result of a short job


@pytest.fixture
def operator(clean_kafka: KafkaSettings) -> Operator:
    return Operator(clean_kafka.bootstrap_servers)


@pytest.fixture
def settings(worker_settings: Settings) -> Settings:
    """Without compression, because the broker compares the compressed size with its limit."""
    return kafka_extra(worker_settings, compression_type="none")


def job(name: str) -> bytes:
    return json.dumps({"job_id": name, "prompt": f"write about {name}", "max_tokens": 8}).encode()


def count(worker: RunningWorker, name: str, **labels: str) -> float:
    return worker.worker.metrics.registry.get_sample_value(name, labels) or 0.0


def takes(settings: Settings, num_bytes: int) -> bool:
    """Whether `results` takes a message of that size; the broker applies a new limit a moment after its answer."""
    with closing(Producer(settings.kafka)) as producer:
        producer.send(RESULTS, key=b"probe", value=b"x" * num_bytes)
        try:
            producer.flush(WAIT_S)
        except DeliveryFailed:
            return False
    return True


def test_a_result_too_large_for_its_topic_is_replaced_and_its_neighbours_go_on(
    settings: Settings, operator: Operator, database: Database
) -> None:
    operator.create(RESULTS, max_message_bytes=LIMIT)
    client = Client(settings)
    small = [f"small-{number}" for number in range(30)]
    with running_worker(settings, VerboseEngine("large")) as worker:
        client.send("code", [*map(job, small[:15]), job("large"), *map(job, small[15:])])
        published = by_key(client.read([RESULTS], lambda records: len({r.key for r in records}) >= 31))
        assert count(worker, "alphaloop_results_refused_total", code="result_too_large", done="replaced") == 1.0
        client.send("code", [job("large")])
        until(lambda: count(worker, "alphaloop_jobs_answered_again_total") == 1.0, "the repeated job is answered")
        again = by_key(client.read([RESULTS], lambda records: len(by_key(records).get("large", [])) >= 2))
    assert {Result.decode(published[name][0]).status for name in small} == {Status.SUCCEEDED}
    assert len(set(again["large"])) == 1, "one job has one result, byte for byte"
    large = Result.decode(again["large"][0])
    assert large.status is Status.FAILED
    assert large.error.code == "result_too_large"
    query = "SELECT status, outcome::text, refused_outcome->>'text' FROM jobs WHERE job_id = 'large'"
    status, recorded, kept = database.one(text(query))
    assert (status, recorded.encode()) == ("failed", again["large"][0]), "recorded and published agree"
    assert len(kept) > LIMIT, "the text is not lost"
    assert num_pending(database) == 0


def test_results_that_only_together_exceed_the_limit_are_all_published(settings: Settings, operator: Operator) -> None:
    operator.create(RESULTS, max_message_bytes=LIMIT, num_partitions=1)
    client = Client(settings)
    with running_worker(kafka_extra(settings, linger_ms=500), FakeEngine(num_slots=32)):
        client.send("code", [job(f"job-{number}") for number in range(60)])
        results = client.results(60)
    assert {result.status for result in results} == {Status.SUCCEEDED}


def test_a_tracestate_of_megabytes_does_no_harm(settings: Settings, rng: random.Random) -> None:
    client = Client(settings)
    hostile = b"a=" + bytes(rng.choices(range(33, 127), k=3_000_000))
    parent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with running_worker(settings, FakeEngine(num_slots=4)):
        client.send("code", [job("hostile")], headers=[("traceparent", parent), ("tracestate", hostile)])
        client.send("code", [job("good")])
        records = client.read([RESULTS], lambda found: len(found) >= 2)
    headers = {record.key: headers_of(record) for record in records}
    assert headers[b"hostile"]["traceparent"] == parent.decode()
    assert "tracestate" not in headers[b"hostile"]
    assert {Result.decode(record.value or b"").status for record in records} == {Status.SUCCEEDED}


def test_a_poisoned_row_is_set_aside_and_published_once_it_is_put_back(
    settings: Settings, operator: Operator, database: Database
) -> None:
    """Two workers died after recording; Kafka refuses the result of one of them."""
    operator.create(RESULTS, max_message_bytes=LIMIT)
    client = Client(settings)
    orphans = [outcome("poisoned", text="word " * 1000), outcome("orphan")]
    for orphan in orphans:
        claim(database, orphan.job_id, owner="dead")
        OutcomeStore(database).record([orphan], owner="dead")
    database.change(text("UPDATE outbox SET created_at = now() - interval '1 h'"))
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        client.send("code", [job("new")])
        published = by_key(client.read([RESULTS], lambda records: len(by_key(records)) >= 2))
        assert set(published) == {"orphan", "new"}
        until(lambda: count(worker, "alphaloop_results_set_aside") == 1.0, "the alert's metric shows it")
    operator.limit(RESULTS, 1 << 20)
    until(lambda: takes(settings, len(orphans[0].result)), "the new limit holds")
    database.change(text("UPDATE outbox SET set_aside_at = NULL, set_aside_because = NULL, relayed_at = NULL"))
    with running_worker(settings, FakeEngine(num_slots=4)):
        published = by_key(client.read([RESULTS], lambda records: b"poisoned" in {r.key for r in records}))
        until(lambda: num_pending(database) == 0, "the outbox is empty")
    assert published["poisoned"] == [orphans[0].result], "the recorded outcome, byte for byte"


def test_a_dead_letter_too_large_for_its_topic_is_shortened(settings: Settings, operator: Operator) -> None:
    operator.create("jobs.code.dlq", max_message_bytes=100_000)
    client = Client(settings)
    bad = json.dumps({"prompt": "x" * 400_000, "max_tokens": "many"}).encode()
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        client.send("code", [bad, b"not JSON", job("good")])
        (result,) = client.results(1)
        letters = client.read(["jobs.code.dlq"], lambda records: len(records) >= 2)
        until(lambda: worker.worker.intake.num_in_flight == 0, "the refused messages are finished")
    assert result.status is Status.SUCCEEDED
    large, small = sorted(letters, key=lambda letter: -len(letter.value or b""))
    assert large.value == bad[:65_536]
    assert headers_of(large)[SHORTENED] == f"65536 of {len(bad)} bytes of the value kept"
    assert headers_of(large)["__dlq.errors.exception"] == "invalid_field"
    assert (small.value, SHORTENED in headers_of(small)) == (b"not JSON", False)


def test_chunks_that_are_refused_hold_up_no_result(settings: Settings, operator: Operator) -> None:
    operator.create(TOKENS, max_message_bytes=100)
    client = Client(settings)
    streamed = json.dumps({"job_id": "streamed", "prompt": "write", "max_tokens": 8, "stream": True}).encode()
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        client.send("chat", [streamed])
        (result,) = client.results(1)
        until(lambda: count(worker, "alphaloop_chunks_dropped_total", code="message_too_large") > 0, "they are counted")
    assert result.status is Status.SUCCEEDED


def test_a_results_topic_that_is_deleted_is_made_again(settings: Settings, operator: Operator) -> None:
    client = Client(settings)
    settings = kafka_extra(settings, topic_metadata_propagation_max_ms=1000)
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        client.send("code", [job("before")])
        client.results(1)
        operator.delete(RESULTS)
        client.send("code", [job("after"), b"no job"])
        until(lambda: RESULTS in list_topics(settings.kafka), "the worker has made the topic again")
        (result,) = client.results(1)
        until(lambda: worker.worker.forwarder.topics.reason(RESULTS) is None, "the worker is ready again")
    assert (result.job_id, result.status) == ("after", Status.SUCCEEDED)
