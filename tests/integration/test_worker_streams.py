"""Streams on a real broker: whatever becomes of a job, a reader gets its text and one end."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import Queue
from typing import Any

import jsonschema
import pytest
from sqlalchemy import text

from alphaloop.contract import chunk_schema, result_schema
from alphaloop.engine import Step
from alphaloop.errors import DecodeFailed
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import CONTROL, RESULTS, TOKENS
from alphaloop.messages import Chunk, Result, Status, StreamReader, StreamReaders, read_chunk
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from engine.own import TransformersEngine
from tests.fakes import FakeEngine
from tests.fixtures.messages import described
from tests.fixtures.postgres import count
from tests.fixtures.worker import WAIT_S, Client, RunningWorker, changed, headers_of, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

#: A publisher that looked for acknowledgements only when its idle wait of 200 ms is over would be later.
SOON_MS = 100
NUM_TRIES = 8
TRACE = {"traceparent": f"00-{7:032x}-{8:016x}-01", "tracestate": "vendor=opaque,other=1"}


def job(number: int, **fields: Any) -> bytes:
    plain = {"job_id": f"job-{number}", "prompt": f"tell story number {number}", "max_tokens": 24, "stream": True}
    return json.dumps({**plain, **fields}).encode()


def by_job(records: Sequence[Record]) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = defaultdict(list)
    for record in records:
        chunk = read_chunk(record.value, record.headers)
        found[chunk.job_id].append(chunk)
    return found


def finals_of(num_jobs: int) -> Any:
    return lambda records: len({r.key for r in records if headers_of(r)["final"] == "1"}) == num_jobs


def assert_whole(chunks: Sequence[Chunk], result: Result) -> None:
    """The stream has no gap and one end, which is the result's, and what a reader makes of it is the result's text."""
    by_attempt: dict[int, set[int]] = defaultdict(set)
    for chunk in chunks:
        by_attempt[chunk.attempt].add(chunk.seq)
    assert all(seqs == set(range(len(seqs))) for seqs in by_attempt.values())
    texts: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        assert texts.setdefault((chunk.attempt, chunk.seq), chunk.text) == chunk.text, "two texts at one place"
    ends = {(chunk.attempt, chunk.seq, chunk.status) for chunk in chunks if chunk.is_final}
    assert ends == {(result.attempt, result.num_chunks, result.status)}
    assert max(by_attempt) == result.attempt
    reader = StreamReader()
    for chunk in chunks:
        reader.take(chunk)
    assert reader.end.status is result.status
    if result.status is Status.SUCCEEDED:
        assert reader.text == result.text
        assert reader.end.finish_reason == result.finish_reason


class Watched(FakeEngine):
    """Calls `before(worker)` before every step; the first waits until the test has called `watch`."""

    def __init__(self, before: Callable[[RunningWorker], None]) -> None:
        super().__init__(acceptance=())
        self._before = before
        self._workers: Queue[RunningWorker] = Queue()
        self._worker: RunningWorker | None = None

    def watch(self, worker: RunningWorker) -> None:
        self._workers.put(worker)

    def step(self) -> Step:
        self._worker = self._worker or self._workers.get(timeout=WAIT_S)
        self._before(self._worker)
        return super().step()

    @property
    def num_streaming(self) -> int:
        return sum(bool(running.output) for running in self._running)


def test_a_job_that_is_decoded_again_after_a_split_has_a_higher_attempt(worker_settings: Settings) -> None:
    failed: list[int] = []

    def fail_once(worker: RunningWorker) -> None:
        if engine.num_steps == 0:
            until(lambda: len(worker.worker.feed.ready) + engine.load().num_running == 3, "all three are here")
        elif engine.num_streaming == 3 and not failed:
            failed.append(engine.num_steps)
            raise DecodeFailed("told to fail once")

    client, engine = Client(worker_settings), Watched(fail_once)
    client.send("code", [job(number) for number in range(3)])
    with running_worker(worker_settings, engine) as worker:
        engine.watch(worker)
        results = {result.job_id: result for result in client.results(3)}
        chunks = by_job(client.read([TOKENS], finals_of(3)))
    for job_id, its in chunks.items():
        assert {chunk.attempt for chunk in its} == {1, 2}
        assert_whole(its, results[job_id])


def test_a_result_comes_soon_after_its_last_chunk_was_acknowledged(worker_settings: Settings) -> None:
    """Its outcome is recorded only then. The quickest of many shows what the worker adds, and not the machine."""

    def has_decoded(num_steps: int) -> bool:
        return engine.num_steps > num_steps and not engine.load().num_running

    client, engine = Client(worker_settings), FakeEngine()
    with running_worker(worker_settings, engine) as worker:
        for number in range(NUM_TRIES):
            num_steps = engine.num_steps
            client.send("code", [job(number)])
            until(partial(has_decoded, num_steps), "the job was decoded")
            until(lambda: not worker.worker.num_unpublished, "its result is published")
        results = client.read([RESULTS], lambda r: len(r) >= NUM_TRIES)
        chunks = client.read([TOKENS], finals_of(NUM_TRIES))
    last_ms = {r.key: r.timestamp_ms or 0 for r in chunks if headers_of(r)["final"] == "0"}
    waits_ms = [(record.timestamp_ms or 0) - last_ms[record.key] for record in results]
    assert min(waits_ms) <= SOON_MS, waits_ms


def test_a_job_that_was_given_back_has_a_higher_attempt_in_the_next_worker(worker_settings: Settings) -> None:
    def hurry_in_the_sixth_step(worker: RunningWorker) -> None:
        if engine.num_steps == 5:
            until(lambda: len(worker.worker.publisher.queue) == 0, "the chunks so far are published")
            worker.stop.set()
            worker.hurry.set()

    client, engine = Client(worker_settings), Watched(hurry_in_the_sixth_step)
    client.send("code", [job(0)])
    with running_worker(worker_settings, engine) as worker:
        engine.watch(worker)
        until(worker.hurry.is_set, "the first worker gives the job back")
    assert client.read([TOKENS], bool), "the first worker streamed something"
    with running_worker(worker_settings, FakeEngine()):
        (result,) = client.results(1)
        chunks = by_job(client.read([TOKENS], finals_of(1)))["job-0"]
    assert len({chunk.attempt for chunk in chunks}) == 2
    assert_whole(chunks, result)


class PoisonedEngine(FakeEngine):
    """Every step with job-3 in it fails, but the first two."""

    def step(self) -> Step:
        poisoned = [running for running in self._running if running.prepared.job.job_id == "job-3"]
        if any(len(running.output) > 1 for running in poisoned):
            raise DecodeFailed("poisoned")
        return super().step()


def test_cancelled_failed_and_expired_jobs_end_their_streams_as_their_results_say(worker_settings: Settings) -> None:
    client = Client(worker_settings)
    past = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
    is_running = threading.Event()

    def cancel_while_it_runs(worker: RunningWorker) -> None:
        if engine.num_steps == 3:
            is_running.set()
            until(lambda: bool(worker.worker.leases.cancelled()), "the cancellation is known")

    engine = Watched(cancel_while_it_runs)
    client.send("code", [job(1)])
    with running_worker(worker_settings, engine) as worker:
        engine.watch(worker)
        assert is_running.wait(WAIT_S)
        client.send_to(CONTROL, b'{"action": "cancel", "job_id": "job-1"}')
        client.results(1)
    with running_worker(worker_settings, PoisonedEngine()):
        client.send("code", [job(2, deadline=past), job(3), job(4)])
        results = {result.job_id: result for result in client.results(4)}
        chunks = by_job(client.read([TOKENS], finals_of(4)))
    assert {job_id: result.status for job_id, result in results.items()} == {
        "job-1": Status.CANCELLED,
        "job-2": Status.EXPIRED,
        "job-3": Status.FAILED,
        "job-4": Status.SUCCEEDED,
    }
    assert results["job-1"].num_chunks, "the cancelled job had streamed something"
    for job_id, its in chunks.items():
        assert_whole(its, results[job_id])


def test_everything_that_is_sent_is_as_the_contract_says(worker_settings: Settings) -> None:
    """Headers of a trace and of a CloudEvent on the job; its result, its chunks, and its answer when it comes again.

    An event's envelope is refused with a way out.
    """
    client = Client(worker_settings)
    event = {"ce_specversion": "1.0", "ce_type": "order", "ce_source": "/shop", "ce_id": "order-7", **TRACE}
    sent = [(name, value.encode()) for name, value in event.items()]
    envelope = [("content-type", b"application/cloudevents+json; charset=utf-8")]
    with running_worker(worker_settings, FakeEngine()):
        client.send("code", [b'{"specversion": "1.0", "data": {"prompt": "x"}}'], headers=envelope)
        client.send("code", [job(1)], headers=sent)
        client.results(1)
        client.send("code", [job(1)], headers=[("traceparent", f"00-{9:032x}-{9:016x}-00".encode())])
        client.send("code", [job(2, stream=False)])
        (refused,) = client.refusals(1)
        answers = Counter([refused.key, b"job-1", b"job-1", b"job-2"])
        results = client.read([RESULTS], lambda records: Counter(r.key for r in records) >= answers)
        chunks = client.read([TOKENS], lambda r: sum(headers_of(x)["final"] == "1" for x in r) == 2)
        (letter,) = client.read(["jobs.code.dlq"], bool)
    assert headers_of(letter)["__dlq.errors.exception"] == "malformed_message"
    assert "binary mode" in headers_of(letter)["__dlq.errors.message"]
    for record in results:
        jsonschema.validate(json.loads(record.value or b""), result_schema())
        jsonschema.validate(dict(headers_of(record)), described("result_headers"))
    for record in chunks:
        jsonschema.validate(json.loads(record.value or b""), chunk_schema())
        jsonschema.validate(dict(headers_of(record)), described("chunk_headers"))
        assert headers_of(record).items() >= TRACE.items()
    first, again, *_ = [record for record in results if record.key == b"job-1"]
    other, *_ = [record for record in results if record.key == b"job-2"]
    assert (first.value, first.headers) == (again.value, again.headers)
    assert headers_of(first).items() >= {**TRACE, "ce_causationid": "order-7"}.items()
    assert not {*TRACE, "ce_causationid"} & headers_of(other).keys()
    ends = [record for record in chunks if headers_of(record)["final"] == "1"]
    assert ends[0].value == ends[1].value
    events = {(headers_of(r)["ce_type"], headers_of(r)["ce_id"], r.value) for r in (*results, *chunks)}
    assert len({event_id for _, event_id, _ in events}) == len(events), "two events have one id"


def test_the_relay_ends_the_stream_of_a_worker_that_died_before_it_could(
    worker_settings: Settings, database: Database
) -> None:
    """Kafka is away for longer than an outcome waits, and the worker dies meanwhile: a reader gets the whole text."""
    client = Client(worker_settings)
    with running_worker(worker_settings, FakeEngine()) as running:
        running.worker.threads.end("publishing", WAIT_S)  # recorded, and never published
        client.send("code", [job(1)], headers=[(name, value.encode()) for name, value in TRACE.items()])
        until(lambda: count(database, "jobs WHERE outcome IS NOT NULL") == 1, "the outcome is recorded")
        running.hurry.set()
    assert count(database, "outbox") == 1
    database.change(text("UPDATE outbox SET created_at = now() - interval '1 h'"))
    with running_worker(worker_settings, FakeEngine()):
        (record,) = client.read([RESULTS], lambda r: len(r) >= 1)
        chunks = client.read([TOKENS], finals_of(1))
    assert headers_of(record).items() >= TRACE.items()
    (end,) = (read_chunk(chunk.value, chunk.headers) for chunk in chunks)
    result = Result.decode(record.value or b"")
    assert (end.attempt, end.seq, end.status) == (result.attempt, result.num_chunks, Status.SUCCEEDED)
    assert result.num_unacknowledged_chunks == result.num_chunks
    reader = StreamReader()
    assert reader.take(end) == reader.text == result.text != ""
    assert reader.end == end


NUM_JOBS = 24
E_ACUTE = "é"


def test_the_deltas_of_each_job_are_its_text(
    worker_settings: Settings, tiny_engine: Callable[..., TransformersEngine], tiny_tokenizer: Any
) -> None:
    """Bytes of é are tokens of their own, and likely ones, so that many characters are split and many are broken."""
    halves = tiny_tokenizer(E_ACUTE)["input_ids"]
    assert len(halves) == 2
    jobs = [
        {
            "job_id": f"job-{number}",
            "stream": True,
            "prompt": f"line {number} of a text with {E_ACUTE}",
            "max_tokens": 48,
            "temperature": 1.0,
            "seed": number,
            "decoding": ("vanilla", "speculative")[number % 2],
            "logit_bias": {str(token): 5 for token in halves} if number % 3 else {},
            "stop": ([], [E_ACUTE * 3, "ae"], ["e", "t"], [f"{E_ACUTE}\ufffd"])[number % 4],
        }
        for number in range(NUM_JOBS)
    ]
    settings = changed(worker_settings, worker={"calibration_budget_s": 0.0})
    client = Client(settings)
    with running_worker(settings, tiny_engine(num_slots=4, context_length=256)):
        client.send("code", [json.dumps(job).encode() for job in jobs])
        results = {result.job_id: result for result in client.results(NUM_JOBS)}
        chunks = client.read([TOKENS], lambda r: sum(headers_of(x)["final"] == "1" for x in r) == NUM_JOBS)
    readers = StreamReaders(results)
    for record in chunks:
        readers.take(read_chunk(record.value, record.headers))
    for job_id, result in results.items():
        end = readers[job_id].end
        assert (readers[job_id].text, end.finish_reason) == (result.text, result.finish_reason)
    texts = [result.text or "" for result in results.values()]
    assert any(E_ACUTE in text for text in texts), "no character was split over tokens"
    assert any("\ufffd" in text for text in texts), "no character was broken"
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}
    assert any((result.num_chunks or 0) > 10 for result in results.values())
