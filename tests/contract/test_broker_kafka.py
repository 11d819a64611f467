"""What Apache Kafka promises beyond the contract: durability, fencing, limits; and how its loss is told."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from alphaloop.embedded.servers import EmbeddedKafka
from alphaloop.errors import BrokerError, BrokerUnavailable, DeliveryFailed, MessageTooLarge, StaleAssignment
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import limit_requests, settings_for
from tests.fixtures.worker import until

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


@pytest.fixture(scope="module")
def own_broker(kafka_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedKafka, str]]:
    """A broker of this module's own, and its address. Its folder's name means something in Java's property files."""
    folder = tmp_path_factory.mktemp("own-kafka") / "dät, a\\u0062 50% #1 'q\" $HOME"
    broker = EmbeddedKafka(kafka_home, folder, heap_mb=128)
    try:
        yield broker, broker.start()
    finally:
        broker.kill()


@pytest.fixture
def own_kafka(own_broker: tuple[EmbeddedKafka, str]) -> tuple[EmbeddedKafka, KafkaSettings]:
    """A broker that the test may kill, and its settings; it runs, whatever the test before did to it."""
    broker, address = own_broker
    if broker.pid is None:
        assert broker.start() == address
    return broker, settings_for(address)


def join(consumer: Consumer, topic: str) -> None:
    """Return when it has both partitions."""
    consumer.subscribe([topic], on_assign=lambda _: None, on_revoke=lambda _: None, on_lost=lambda _: None)
    until(lambda: not consumer.poll(0.1) and len(consumer.assignment()) == 2, "it has both partitions")


def test_kill_9_and_restart_lose_nothing_and_clients_go_on(
    own_kafka: tuple[EmbeddedKafka, KafkaSettings], fresh_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "alphaloop.kafka")
    broker, kafka = own_kafka
    ensure_topics(kafka, [fresh_prefix])
    topic = jobs_topic(fresh_prefix)
    with closing(Producer(kafka)) as producer, closing(Consumer(kafka, group_id=fresh_prefix)) as consumer:
        consumer.assign_from([topic], at="earliest")
        for i in range(2000):
            producer.send(topic, key=None, value=b"%d" % i)
        producer.flush(30)
        committed = {TopicPartition(topic, 1): 7}
        consumer.commit(committed)
        broker.kill()
        for i in range(2000, 2500):
            producer.send(topic, key=None, value=b"%d" % i)
        with pytest.raises(DeliveryFailed, match=rf"500 to {topic} not acknowledged within 2 s"):
            producer.flush(2)
        read: list[int] = []

        def take(reader: Consumer) -> int:
            """How much has been read."""
            read.extend(int(record.value or b"") for record in reader.poll_many(500, 0.2))
            return len(read)

        def num_losses() -> int:
            return sum("no broker answers" in message for message in caplog.messages)

        until(lambda: take(consumer) >= 0 and num_losses() >= 2, "both clients tell the loss")
        with pytest.raises(BrokerUnavailable, match="no broker answers now"):
            consumer.commit({TopicPartition(topic, 0): 1})
        with pytest.raises(BrokerUnavailable):
            consumer.bounds([topic])[TopicPartition(topic, 0)]
        assert settings_for(broker.start()) == kafka, "the address survives"
        producer.flush(60)  # what was waiting is delivered, once
        until(lambda: take(consumer) >= 2500, "everything is read")
        take(consumer)
        assert sorted(read) == list(range(2500)), "the client that lived through it goes on"
        assert consumer.committed(committed) == committed
        read.clear()
        with closing(Consumer(kafka, group_id=fresh_prefix)) as newcomer:
            newcomer.assign_from([topic], at="earliest")
            until(lambda: take(newcomer) >= 2500, "everything is read")
            take(newcomer)
        assert sorted(read) == list(range(2500)), "everything is in the broker, once"
    lost = [message for message in caplog.messages if "no broker answers" in message]
    back = [message for message in caplog.messages if "answers again" in message]
    # One for each of the two clients; on a busy machine a broker that starts may be found and lost a few times more.
    assert 2 <= len(lost) == len(back) <= 8, "as many returns as losses, each told once"
    assert not [m for m in caplog.messages if "Connection refused" in m], "librdkafka's own repetition is held back"


def _has_stopped(pid: int | None) -> bool:
    """Threads of a process that was sent SIGSTOP stop one after the other, and one of them may still answer."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        return True  # not Linux
    return {task.joinpath("stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} == {"T"}


def test_a_commit_to_a_broker_that_hangs_ends_in_time_and_the_next_may_succeed(
    own_kafka: tuple[EmbeddedKafka, KafkaSettings], fresh_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, kafka = own_kafka
    ensure_topics(kafka, [fresh_prefix])
    limit_requests(monkeypatch, 1.0)
    partition = TopicPartition(jobs_topic(fresh_prefix), 0)
    consumer = Consumer(kafka, group_id=fresh_prefix)
    try:
        join(consumer, partition.topic)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGSTOP)
        until(lambda: _has_stopped(broker.pid), "every thread of the broker stands still")
        begun = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=r"no answer within 1 s"):
            consumer.commit({partition: 1})
        with pytest.raises(BrokerUnavailable, match="no broker answers now"):
            consumer.commit({partition: 1})
        assert time.monotonic() - begun < kafka.session_timeout_ms / 1000, "for which the client itself would block"
        os.kill(broker.pid, signal.SIGCONT)

        def commits() -> bool:
            consumer.poll(0.1)
            with contextlib.suppress(BrokerError):
                consumer.commit({partition: 2})
                return True
            return False

        until(commits, "a commit succeeds")
        assert consumer.committed([partition]) == {partition: 2}
    finally:
        if broker.pid is not None:
            os.kill(broker.pid, signal.SIGCONT)
        consumer.close()


def test_a_member_that_did_not_poll_may_not_commit_any_more(kafka_settings: KafkaSettings, fresh_prefix: str) -> None:
    ensure_topics(kafka_settings, [fresh_prefix])
    topic = jobs_topic(fresh_prefix)
    hasty = {"session_timeout_ms": 3000, "extra": {"max.poll.interval.ms": 3000}}
    slow = Consumer(kafka_settings.model_copy(update=hasty), group_id=fresh_prefix)
    heir = Consumer(kafka_settings, group_id=fresh_prefix)
    lost: list[TopicPartition] = []
    revoked_late: list[TopicPartition] = []
    refused: list[TopicPartition] = []

    def commit_as_always(partitions: Sequence[TopicPartition]) -> None:
        revoked_late.extend(partitions)
        # At its close it may be a member again, with partitions of its own.
        with contextlib.suppress(StaleAssignment):
            slow.commit(dict.fromkeys(partitions, 1))
            return
        refused.extend(partitions)

    try:
        slow.subscribe([topic], on_assign=lambda _: None, on_revoke=commit_as_always, on_lost=lost.extend)
        until(lambda: not slow.poll(0.1) and len(slow.assignment()) == 2, "it has both partitions")
        join(heir, topic)
        with pytest.raises(StaleAssignment):
            slow.commit({TopicPartition(topic, 0): 1})
        assert lost == revoked_late == [], "nobody has told this member yet: only the broker knows"
        until(lambda: not slow.poll(0.1) and len(lost) + len(revoked_late) == 2, "it is told of both")
        # The partition that was to move when the second member came is still handed over by on_revoke.
        assert (len(revoked_late), len(lost)) == (1, 1)
        assert refused == revoked_late
    finally:
        heir.close()
        slow.close()


def test_a_message_over_the_topics_limit_is_refused(kafka_settings: KafkaSettings, fresh_prefix: str) -> None:
    ensure_topics(kafka_settings, [fresh_prefix])
    topic = jobs_topic(fresh_prefix)
    outcomes: list[BrokerError | None] = []
    with closing(Producer(kafka_settings)) as producer:
        fits, too_large = b"\x00" * (1 << 20), bytes(range(251)) * (kafka_settings.max_message_bytes // 251 + 100)
        producer.send(topic, key=None, value=fits, on_delivery=outcomes.append)
        producer.flush(30)
        assert outcomes == [None]
        with pytest.raises(MessageTooLarge, match="MSG_SIZE_TOO_LARGE"):
            producer.send(topic, key=None, value=too_large * 2)


def test_a_topic_that_is_not_there_fails_the_flush_and_names_it(
    kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    topic, outcomes = jobs_topic(fresh_prefix), list[BrokerError | None]()
    impatient = kafka_settings.model_copy(update={"extra": {"delivery.timeout.ms": 1500}})
    with closing(Producer(impatient)) as producer:
        producer.send(topic, key=None, value=b"1")
        with pytest.raises(DeliveryFailed, match=rf"1 to {topic} refused; first reason"):
            producer.flush(30)
        producer.flush(1)  # what was reported is not reported again
        producer.send(topic, key=None, value=b"1", on_delivery=outcomes.append)
        producer.flush(30)  # nor is what was told to who sent it
        (outcome,) = outcomes
        assert isinstance(outcome, BrokerError)


def test_what_a_callback_raises_comes_out_of_poll_and_the_assignment_stands(
    kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    ensure_topics(kafka_settings, [fresh_prefix])
    topic = jobs_topic(fresh_prefix)

    def refuse(_: object) -> None:
        raise LookupError("of the application")

    with closing(Consumer(kafka_settings, group_id=fresh_prefix)) as consumer:
        consumer.subscribe([topic], on_assign=refuse, on_revoke=lambda _: None, on_lost=lambda _: None)
        with pytest.raises(LookupError, match="of the application"):
            until(lambda: consumer.poll(0.2) is not None, "the callback raises")
        assert len(consumer.assignment()) == 2
