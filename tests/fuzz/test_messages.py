"""Fuzzed messages on the way of real ones: each becomes a job that is claimed, or a dead letter that is stored.

`make fuzz` runs 100,000; FUZZ_MESSAGES sets another number. The seed is the run's (TEST_SEED), so that a run repeats.
"""

from __future__ import annotations

import os
import random
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.errors import JobConflict, MessageError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.messages import Job, Origin, Result, Status, encode_job, parse_job, payload_digest
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from engine.prompts import longest_token_chars, prepare_job
from tests.fakes import FakeEngine
from tests.fixtures.publishing import NOW, FinishedDeliveries
from tests.fixtures.worker import RunningWorker
from tests.fuzz.mutations import mutated
from worker import recording
from worker.background import Retry
from worker.claims import Claiming, LeaseKeeper, cancelled
from worker.dead_letters import DeadMessage
from worker.intake.partitions import Delivery
from worker.intake.validation import ReadyJob

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_MESSAGES: Final = int(os.environ.get("FUZZ_MESSAGES", "2000"))
GROUP: Final = 200
GROUP_BYTES: Final = 8 << 20
CONTEXT: Final = 4096


class TokenizingEngine(FakeEngine):
    """A fake that decodes nothing, with a real tokenizer and a real chat template."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(context_length=CONTEXT)
        self._tokenizer = tokenizer
        self._longest = longest_token_chars(tokenizer)

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        target = self.identity.target
        return prepare_job(self._tokenizer, target, CONTEXT, job, sampling, longest_token_chars=self._longest)


class Reader:
    """Reads messages as a worker does, and keeps count of what became of them."""

    def __init__(self, worker: RunningWorker, database: Database) -> None:
        self._worker = worker
        self._parts = worker.worker
        jobs, retry = JobStore(database), Retry(threading.Event())
        leases = LeaseKeeper(jobs, owner="fuzz", lease_s=3600.0)
        self._claiming = Claiming(jobs, leases, owner="fuzz", lease_s=3600.0, max_attempts=3, retry=retry)
        self._finished = FinishedDeliveries()
        self._ready: list[ReadyJob] = []
        self._num_waiting = self._waiting_bytes = 0
        self._refused_on: set[str] = set()
        self.num_read = 0
        self.num_refused = 0
        self.claims: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.crashes: list[str] = []

    def read(self, record: Record) -> None:
        """One message; what is neither a job nor a MessageError is a crash."""
        delivery = Delivery(record, epoch=1)
        self.num_read += 1
        try:
            ready = self._parts.validation.read(delivery)
            check_job(ready)
        except MessageError as error:
            self._refuse(delivery, error)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            value = (record.value or b"")[:300]
            self.crashes.append(f"{type(error).__name__} at {where.filename}:{where.lineno}: {value!r}")
        else:
            self._ready.append(ready)
        self._num_waiting += 1
        self._waiting_bytes += delivery.num_bytes
        if self._num_waiting >= GROUP or self._waiting_bytes >= GROUP_BYTES:
            self.settle()

    def settle(self) -> None:
        """Claim what is a job and publish the letters of what is none, as far as it was read."""
        self._num_waiting = self._waiting_bytes = 0
        claims = self._claiming.claim(self._ready)
        self.claims.update(
            claimed=len(claims.to_decode),
            held=len(claims.held),
            refused=len(claims.refused),
            answered=len(claims.answered),
        )
        for claimed in claims.to_decode:
            outcome = recording.ended(claimed, Status.CANCELLED, cancelled(), now=NOW).outcome
            assert Result.decode(outcome.result).job_id == claimed.job_id
        for ready, error in claims.refused:
            assert isinstance(error, JobConflict)
            self._refuse(ready.delivery, error)
        self._ready.clear()
        while len(self._parts.forwarder):
            self._parts.forwarder.turn(0.0)

    def _refuse(self, delivery: Delivery, error: MessageError) -> None:
        self.refusals[error.code] += 1
        self.num_refused += 1
        self._refused_on.add(delivery.record.topic)
        self._parts.forwarder.put(DeadMessage(delivery, error, self._finished))  # type: ignore[arg-type]

    def check(self) -> None:
        """Every message was a job or is in a dead-letter topic."""
        self.settle()
        assert self.crashes == []
        assert sum(self.claims.values()) - self.claims["refused"] + self.num_refused == self.num_read
        assert len(self._finished.finished) == self.num_refused == self._num_letters()

    def _num_letters(self) -> int:
        kafka = self._worker.settings.kafka
        consumer = Consumer(kafka, group_id="fuzz")
        try:
            letters = consumer.bounds([f"{topic}.dlq" for topic in sorted(self._refused_on)])
            return sum(high - low for low, high in letters.values())
        finally:
            consumer.close()


def check_job(ready: ReadyJob) -> None:
    """What the parts behind the intake rely on."""
    job, sampling = ready.job, ready.prepared.sampling
    assert 1 <= len(ready.prepared.token_ids) < CONTEXT
    assert 1 <= sampling.max_tokens <= CONTEXT - len(ready.prepared.token_ids)
    assert 0 <= sampling.temperature <= 2
    assert ready.num_bytes >= len(ready.delivery.record.value or b"")
    # A job that is written again, as the retry and batch commands do, is the same job.
    again = parse_job(encode_job(job), Origin("other", "jobs.other", 0, 0), task=job.task, max_bytes=2**24)
    assert payload_digest(again) == payload_digest(job) == ready.payload_sha256
    assert again.job_id == job.job_id


@pytest.fixture
def reader(worker_settings: Settings, database: Database, tiny_tokenizer: Any) -> Iterator[Reader]:
    worker = RunningWorker(worker_settings, TokenizingEngine(tiny_tokenizer), seed=1)
    try:
        yield Reader(worker, database)
    finally:
        worker.close()


@pytest.mark.timeout(180 + NUM_MESSAGES // 20)
def test_every_mutation_of_a_job_is_answered_or_a_dead_letter(reader: Reader, rng: random.Random) -> None:
    for number in range(NUM_MESSAGES):
        reader.read(mutated(rng, number))
    reader.check()
    print(f"\n{reader.num_read} mutated messages: {dict(reader.claims)}, refused: {dict(reader.refusals)}")
    # Neither kind is rare, or the mutations test one half only.
    assert min(reader.claims["claimed"], reader.num_refused) > reader.num_read // 20
    assert {"malformed_message", "invalid_field", "unknown_task", "prompt_too_long"} <= reader.refusals.keys()
