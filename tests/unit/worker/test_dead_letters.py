"""Messages on their way to dead-letter and retry topics: bounded, never in the way of others."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from alphaloop.errors import (
    BrokerError,
    BrokerUnavailable,
    DeliveryFailed,
    FatalBrokerError,
    InvalidField,
    MessageRefused,
    MessageTooLarge,
    StoreUnavailable,
    TopicUnavailable,
)
from alphaloop.kafka.topics import CONTROL, RESULTS
from alphaloop.messages import DeadLetter, Failure, RecordPlace, Result, Status
from alphaloop.messages.dead_letter import JOB_ID, OUTCOME, SHORTENED
from alphaloop.messages.headers import RetryHeaders as RetryHeaders
from tests.fixtures.publishing import (
    NOW,
    FakeProducer,
    FinishedDeliveries,
    InstantEvent,
    SentMessage,
    claimed_job,
    delivery,
    validation,
)
from worker import dead_letters
from worker.background import Retry
from worker.claims import ClaimedJob
from worker.dead_letters import RETRY_S, DeadMessage, FailedTry, Forwarded, Forwarder, JobRetries, letter_of
from worker.intake.partitions import JITTER, Delivery
from worker.metrics import WorkerMetrics
from worker.sending import DeliveryReport, KafkaMessage, UnavailableTopics

CODE, SQL = "jobs.code.dlq", "jobs.sql.dlq"


class Broker(FakeProducer):
    """Takes messages that are no larger than the limit of their topic, unless the topic is told to fail."""

    def __init__(self) -> None:
        super().__init__(self._judge)
        self.limits: dict[str, int] = {}
        self.failing: dict[str, BrokerError] = {}
        self.forbidden: set[str] = set()
        self.created: list[str] = []
        self.fatal: list[FatalBrokerError] = []
        self.num_producers = 0
        self.is_closed = False

    def open(self) -> Broker:
        self.num_producers += 1
        return self

    def close(self) -> None:
        self.is_closed = True

    def create(self, topic: str) -> None:
        self.created.append(topic)
        if topic in self.forbidden:
            raise BrokerError(f"creating {topic}: not allowed")

    def _judge(self, message: SentMessage) -> DeliveryReport:
        if self.fatal:
            raise self.fatal.pop(0)
        size = len(message.value) + sum(len(name) + len(content) for name, content in message.headers)
        if size > self.limits.get(message.topic, 1 << 30):
            return MessageTooLarge(f"{size} bytes")
        return self.failing.get(message.topic)


class Writing:
    """The thread's part, turned by hand."""

    def __init__(self) -> None:
        self.broker, self.intake, self.now = Broker(), FinishedDeliveries(), 0.0
        self.metrics = WorkerMetrics()
        self.topics = UnavailableTopics(self.broker.create, self.metrics.topic_unavailable)
        self.letters = Forwarder(
            self.broker.open,
            self.topics,
            self.metrics,
            letter_of=partial(letter_of, validation=validation(), group="g"),
            is_hurried=threading.Event().is_set,
            clock=lambda: self.now,
        )

    def refuse(self, *offsets: int, task: str = "code", value: bytes = b"?") -> None:
        error = InvalidField("expected a number", field="body.max_tokens")
        for offset in offsets:
            refused = delivery("bad", task=task, offset=offset, value=value)
            self.letters.put(DeadMessage(refused, error, self.intake))  # type: ignore[arg-type]

    def turn(self) -> None:
        """Until nothing is left but what waits for its topic."""
        self.letters.turn(0.0)
        while len(self.letters):
            self.letters.turn(0.0)

    def sent(self, topic: str) -> list[SentMessage]:
        return [message for message in self.broker.acknowledged if message.topic == topic]

    def finished(self) -> list[tuple[str, int]]:
        return [(one.record.topic, one.record.offset) for one in self.intake.finished]


def test_a_message_is_finished_when_its_letter_and_then_its_result_are_acknowledged() -> None:
    one = Writing()
    one.refuse(1, 2)
    assert len(one.letters) == 2
    one.letters.turn(0.0)
    assert [(letter.topic, letter.value) for letter in one.broker.acknowledged] == [(CODE, b"?")] * 2
    assert one.finished() == [], "their results are not sent yet"
    one.turn()
    assert [message.topic for message in one.broker.acknowledged] == [CODE, CODE, RESULTS, RESULTS]
    assert one.finished() == [("jobs.code", 1), ("jobs.code", 2)]
    assert one.broker.created == [CODE, RESULTS], "each topic is ensured once"
    assert one.metrics.registry.get_sample_value("alphaloop_dead_letters_total", {"code": "invalid_field"}) == 2.0
    assert (len(one.letters), one.broker.num_producers) == (0, 1)


def test_the_result_names_the_record_and_the_letter_names_the_result() -> None:
    one = Writing()
    one.refuse(7, value=b'{"job_id": "mine", "custom_id": "c", "batch_id": "b", "max_tokens": "x"}')
    one.turn()
    (letter,), (answer,) = one.sent(CODE), one.sent(RESULTS)
    result = Result.decode(answer.value)
    assert (answer.key, result.job_id, result.status, result.attempt) == (b"mine", "mine", Status.REFUSED, 1)
    assert result.origin == RecordPlace(topic="jobs.code", partition=0, offset=7)
    assert (result.task, result.custom_id, result.batch_id) == ("code", "c", "b")
    assert result.error == Failure(code="invalid_field", message="expected a number", field="body.max_tokens")
    headers = dict(letter.headers)
    assert (headers[JOB_ID], OUTCOME in headers) == (b"mine", False)


def test_a_letter_whose_topic_is_unavailable_holds_back_its_result() -> None:
    one = Writing()
    one.broker.forbidden = {CODE}
    one.refuse(1)
    one.turn()
    assert one.broker.acknowledged == []


def test_a_message_of_another_topic_than_those_of_jobs_has_a_letter_only() -> None:
    one = Writing()
    record = replace(delivery("bad").record, topic=CONTROL)
    told = Delivery(record, epoch=1), InvalidField("expected cancel", field="action"), one.intake
    one.letters.put(DeadMessage(*told))  # type: ignore[arg-type]
    one.turn()
    assert [message.topic for message in one.broker.acknowledged] == [f"{CONTROL}.dlq"]
    assert JOB_ID not in dict(one.broker.acknowledged[0].headers)
    assert one.finished() == [(CONTROL, 0)]


def test_many_waiting_results_pause_their_topic_whatever_its_letters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MOST_WAITING", 2)
    one = Writing()
    one.broker.forbidden = {RESULTS}
    one.refuse(1, 2)
    one.turn()
    assert one.intake.held == {"jobs.code"}
    one.refuse(3)
    one.letters.turn(0.0)
    assert one.intake.held == {"jobs.code"}, "its letter was published"
    one.broker.forbidden = set()
    one.now = RETRY_S
    one.turn()
    assert one.intake.held == set()
    assert [offset for _, offset in one.finished()] == [1, 2, 3]


@pytest.mark.parametrize("topic", [CODE, RESULTS])
@pytest.mark.parametrize("error", [TopicUnavailable("gone"), DeliveryFailed("timed out"), MessageRefused("no key")])
def test_what_is_not_acknowledged_is_sent_again_later(error: BrokerError, topic: str) -> None:
    one = Writing()
    one.broker.failing = {topic: error}
    one.refuse(1, 2)
    one.turn()
    assert one.finished() == []
    one.broker.failing = {}
    one.refuse(3)
    one.turn()
    assert one.finished() == [], "later messages of the topic wait in line"
    one.now = RETRY_S
    one.turn()
    assert [offset for _, offset in one.finished()] == [1, 2, 3]


def test_many_waiting_letters_pause_their_topic_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MOST_WAITING", 3)
    one = Writing()
    one.broker.forbidden = {CODE}
    one.refuse(1, 2)
    one.turn()
    assert one.intake.held == set()
    one.refuse(3)
    one.refuse(4, task="sql")
    one.turn()
    assert one.intake.held == {"jobs.code"}
    one.broker.forbidden = set()
    one.now = RETRY_S
    one.turn()
    assert one.intake.held == set()
    assert sorted(offset for _, offset in one.finished()) == [1, 2, 3, 4]


def test_a_few_large_letters_pause_their_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MOST_WAITING_BYTES", 1000)
    one = Writing()
    one.broker.forbidden = {CODE}
    one.refuse(1, value=b"x" * 1000)
    one.turn()
    assert one.intake.held == {"jobs.code"}


def test_messages_of_revoked_partitions_are_left_to_their_new_owner() -> None:
    one = Writing()
    one.broker.forbidden = {CODE}
    one.refuse(1, 2)
    one.turn()
    one.intake.revoked = [delivery("bad", offset=1, value=b"?")]
    one.broker.forbidden = set()
    one.now = RETRY_S
    one.turn()
    assert [offset for _, offset in one.finished()] == [2]


def test_a_letter_that_is_still_too_large_keeps_its_reason_only() -> None:
    one = Writing()
    one.broker.limits = {CODE: 1000}
    one.refuse(1, value=b"x" * 200_000)
    one.turn()
    (letter,) = one.sent(CODE)
    headers = dict(letter.headers)
    assert letter.value == b""
    assert one.finished() == [("jobs.code", 1)], "its result is answered, too"
    assert headers["__dlq.errors.exception"] == b"invalid_field"
    assert headers[SHORTENED] == (b"65536 of 200000 bytes of the value kept; 0 of 65536 bytes of the value kept")


def test_a_dead_producer_is_replaced() -> None:
    one = Writing()
    one.broker.fatal = [FatalBrokerError("fenced")]
    one.refuse(1)
    one.turn()
    assert (one.finished(), one.broker.is_closed) == ([], True)
    one.now = RETRY_S
    one.turn()
    assert (one.finished(), one.broker.num_producers) == ([("jobs.code", 1)], 2)


FAILURE = Failure(code="decode_failed", message="no luck")


class World:
    """The store, the leases and the recorder as the retries see them; `events` has what was asked, in order."""

    def __init__(self, *, seed: int = 1) -> None:
        self.events: list[object] = []
        self.store_errors: list[Exception] = []
        self.topic_errors: list[Exception] = []
        self.failed: list[FailedTry] = []
        self.taken: list[Forwarded] = []
        self.now_s = 100.0
        self.retries = JobRetries(
            (10, 60),
            self,  # type: ignore[arg-type]
            SimpleNamespace(put=lambda *messages: self.taken.extend(messages)),  # type: ignore[arg-type]
            FinishedDeliveries(),  # type: ignore[arg-type]
            count=self._count,
            fail=self.failed.append,
            ensure_topics=self._ensure,
            retry=Retry(InstantEvent()),
            rng=random.Random(seed),
            max_bytes=1 << 20,
            clock=lambda: self.now_s,
        )

    def _count(self, attempts: Mapping[str, int]) -> None:
        self.events.append(("counted", dict(attempts)))
        if self.store_errors:
            raise self.store_errors.pop(0)

    def let_go(self, job_ids: Mapping[str, int]) -> None:
        assert not self.taken, "let go before it is sent"
        self.events.append(("let go", sorted(job_ids)))

    def _ensure(self, task: str) -> None:
        self.events.append(("topics", task))
        if self.topic_errors:
            raise self.topic_errors.pop(0)

    def sent(self) -> list[DeadLetter | KafkaMessage]:
        sent, self.taken = self.taken, []
        return [one.letter for one in sent]


def failed(num_failures: int = 0, **given: Any) -> ClaimedJob:
    return replace(claimed_job("job", attempt=3, **given), num_failures=num_failures)


@pytest.mark.parametrize(("num_failures", "topic"), [(0, "jobs.code.retry.10s"), (1, "jobs.code.retry.1m")])
def test_each_failure_waits_longer_and_is_counted_before_it_is_sent(num_failures: int, topic: str) -> None:
    world = World()
    assert world.retries.put(failed(num_failures), FAILURE, NOW)
    assert len(world.retries) == 1
    assert world.retries.turn(0.0) == 1
    assert world.events == [("topics", "code"), ("counted", {"job": 3}), ("let go", ["job"])]
    (sent,) = world.sent()
    said = RetryHeaders.read(sent.headers)
    assert (sent.topic, said.num_failures, said.reason) == (topic, num_failures + 1, "decode_failed")
    assert world.retries.turn(0.0) == 0
    assert len(world.retries) == 0


def test_delays_have_jitter_within_its_bound() -> None:
    waits_s = set()
    for seed in range(50):
        world = World(seed=seed)
        world.retries.put(failed(), FAILURE, NOW)
        world.retries.turn(0.0)
        (sent,) = world.sent()
        said = RetryHeaders.read(sent.headers)
        waits_s.add(said.not_before_ms / 1000 - NOW.timestamp())
    assert len(waits_s) > 40
    assert 10 <= min(waits_s) < 10.5 < 10 * (1 + JITTER) - 0.5 < max(waits_s) <= 10 * (1 + JITTER)


def test_jobs_that_cannot_gain_by_another_try_have_failed() -> None:
    world = World()
    soon = (NOW + timedelta(seconds=10)).isoformat()
    for hopeless in (failed(2), failed(deadline=soon), failed(purpose="probe"), failed(purpose="control")):
        assert not world.retries.put(hopeless, FAILURE, NOW)
    assert len(world.retries) == 0
    later = (NOW + timedelta(seconds=13)).isoformat()
    assert world.retries.put(failed(deadline=later), FAILURE, NOW)


def test_a_task_without_topics_has_no_retries_and_is_asked_about_again_after_a_while() -> None:
    world = World()
    world.topic_errors = [BrokerError("creating topics: not authorized")]
    for num_failed in (1, 2):
        world.retries.put(failed(), FAILURE, NOW)
        assert world.retries.turn(0.0) == 0
        assert len(world.failed) == num_failed, "the job has failed for good"
    assert world.events == [("topics", "code")], "the broker is not asked for every job"
    world.now_s += RETRY_S
    world.retries.put(failed(), FAILURE, NOW)
    assert world.retries.turn(0.0) == 1
    assert len(world.sent()) == 1
    assert len(world.failed) == 2


def test_servers_that_are_away_are_waited_for() -> None:
    world = World()
    world.store_errors = [StoreUnavailable("nobody answers")]
    world.topic_errors = [BrokerUnavailable("nobody answers")]
    world.retries.put(failed(), FAILURE, NOW)
    assert world.retries.turn(0.0) == 1
    assert len(world.sent()) == 1, "sent whatever the second answer was, because the first may have been lost"
    assert [event for event in world.events if event == ("counted", {"job": 3})] == [("counted", {"job": 3})] * 2
