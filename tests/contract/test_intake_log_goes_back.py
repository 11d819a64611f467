"""A topic that is deleted and made again under a running consumer: every message of the new topic is delivered."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from alphaloop.kafka.client import client_config
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import topic_ids
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import committed, intake_of, send
from tests.fixtures.worker import WAIT_S, until
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake, TopicWatch

pytestmark = pytest.mark.kafka

NUM_BEFORE, NUM_AFTER = 100, 50


class Topic:
    """A topic of one partition that can be made anew."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self.name = name
        self.partition = TopicPartition(name, 0)
        self._kafka = kafka
        self._admin = AdminClient(client_config(kafka))
        self.create()

    def create(self) -> None:
        """Make it; a topic of that name may still be going."""
        new = NewTopic(self.name, 1, 1)
        until(lambda: self._admin.create_topics([new])[self.name].exception(WAIT_S) is None, f"{self.name} is made")

    def make_anew(self) -> None:
        """Delete it and make it again, as fast as the broker does it."""
        self._admin.delete_topics([self.name])[self.name].result(WAIT_S)
        self.create()

    def send(self, values: list[bytes]) -> None:
        """Send messages and wait until the broker has them."""
        send(self._kafka, self.name, values)

    def committed(self) -> int | None:
        """The offset that the group named like the topic has committed."""
        return committed(self._kafka, self.name, self.partition)[0]


@pytest.fixture
def patient(kafka_settings: KafkaSettings) -> KafkaSettings:
    """Settings with which a client asks for topics seldom, so that a deletion that is soon made good goes unnoticed."""
    return kafka_settings.model_copy(update={"extra": {"topic.metadata.refresh.interval.ms": 60_000}})


@pytest.fixture
def topic(patient: KafkaSettings, fresh_prefix: str) -> Topic:
    return Topic(patient, f"jobs.{fresh_prefix}")


@pytest.fixture
def intake(patient: KafkaSettings, topic: Topic) -> Iterator[Intake]:
    intake = intake_of(patient, topic.name, topic.name)
    intake.start()
    yield intake
    intake.close(WAIT_S)


@pytest.fixture
def watch(patient: KafkaSettings, intake: Intake) -> TopicWatch:
    return TopicWatch([intake], partial(topic_ids, patient), every_s=0.0)


def take(intake: Intake, wanted: set[bytes]) -> list[Delivery]:
    """Deliveries until these values have all come."""
    taken: list[Delivery] = []
    until(lambda: taken.extend(intake.take(100, 1.0)) or wanted <= {one.record.value for one in taken}, "all have come")
    return taken


def wait_until_committed(topic: Topic, offset: int) -> None:
    until(lambda: topic.committed() == offset, f"{offset} is committed")


def test_a_topic_made_anew_is_read_from_its_beginning(topic: Topic, intake: Intake) -> None:
    old = [b"old %d" % number for number in range(NUM_BEFORE)]
    topic.send(old)
    intake.finish(take(intake, set(old)))
    wait_until_committed(topic, NUM_BEFORE)
    topic.make_anew()
    new = [b"new %d" % number for number in range(NUM_AFTER)]
    topic.send(new)
    deliveries = take(intake, set(new))
    intake.finish(deliveries[:10])
    wait_until_committed(topic, 10)
    intake.finish(deliveries[10:])
    wait_until_committed(topic, NUM_AFTER)


def unread_beyond(topic: Topic, intake: Intake, watch: TopicWatch, extra: list[bytes]) -> list[bytes]:
    """Make the topic anew with as many messages as were read, while nobody asks for the next one; the new messages."""
    old = [b"old %d" % number for number in range(NUM_BEFORE)]
    topic.send(old)
    intake.finish(take(intake, set(old)))
    watch.check()
    wait_until_committed(topic, NUM_BEFORE)
    intake.hold(topic.name)
    until(lambda: intake.is_paused(topic.partition), "the partition is paused")
    topic.make_anew()
    new = [b"new %d" % number for number in range(NUM_BEFORE)] + extra
    topic.send(new)
    return new


def test_a_topic_made_anew_with_as_many_messages_is_read_from_its_beginning(
    topic: Topic, intake: Intake, watch: TopicWatch
) -> None:
    new = unread_beyond(topic, intake, watch, [])
    intake.release(topic.name)
    until(lambda: watch.check() or intake.num_in_flight > 0, "the change is noticed")
    intake.finish(take(intake, set(new)))
    wait_until_committed(topic, NUM_BEFORE)


def test_a_worker_that_did_not_notice_leaves_it_to_the_next_one(
    patient: KafkaSettings, topic: Topic, intake: Intake, watch: TopicWatch
) -> None:
    new = unread_beyond(topic, intake, watch, [b"behind the others"])
    intake.release(topic.name)
    last = take(intake, {b"behind the others"})
    assert len(last) == 1, "the others were passed over"
    intake.finish(last)
    wait_until_committed(topic, NUM_BEFORE + 1)
    intake.close(WAIT_S)
    following = intake_of(patient, topic.name, topic.name)
    following.start()
    try:
        following.finish(take(following, set(new)))
    finally:
        following.close(WAIT_S)
    assert topic.committed() == NUM_BEFORE + 1
