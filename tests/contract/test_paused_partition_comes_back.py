"""A member pauses a partition, loses it to another member and gets it back: it reads on where the group has got to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka


class Member:
    """A member of a group; it notes what it reads."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self.consumer = Consumer(kafka, group_id=name)
        self.read: list[Record] = []
        self.consumer.subscribe(
            [jobs_topic(name)], on_assign=lambda _: None, on_revoke=lambda _: None, on_lost=lambda _: None
        )

    def poll(self) -> None:
        """Take a record, if there is one."""
        record = self.consumer.poll(0.05)
        if record is not None:
            self.read.append(record)


@pytest.fixture
def patient(kafka_settings: KafkaSettings, fresh_prefix: str) -> Iterator[Member]:
    """The member that stays."""
    ensure_topics(kafka_settings.model_copy(update={"num_partitions": 2}), [fresh_prefix])
    member = Member(kafka_settings, fresh_prefix)
    yield member
    member.consumer.close()


def test_a_partition_that_was_paused_is_read_when_it_comes_back(
    patient: Member, kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    topic = jobs_topic(fresh_prefix)
    both = {TopicPartition(topic, 0), TopicPartition(topic, 1)}
    producer = Producer(kafka_settings)

    def send(value: bytes) -> None:
        for one in sorted(both):
            producer.send(topic, key=None, value=value, partition=one.partition)
        producer.flush(30)

    def both_have(number: int) -> bool:
        patient.poll()
        return len(patient.read) == number

    try:
        send(b"first")
        until(lambda: both_have(2), "both partitions are read")
        patient.consumer.pause(both)
        patient.consumer.commit(dict.fromkeys(both, 1))
        other = Member(kafka_settings, fresh_prefix)

        def is_shared() -> bool:
            patient.poll()
            other.poll()
            return len(patient.consumer.assignment()) == len(other.consumer.assignment()) == 1

        until(is_shared, "each member has a partition")
        (moved,) = other.consumer.assignment()
        other.consumer.close()

        def is_back() -> bool:
            patient.poll()
            return patient.consumer.assignment() == both

        until(is_back, "the partition came back")
        send(b"second")
        until(lambda: both_have(3), "the partition that came back is read")
        (new,) = patient.read[2:]
        assert (new.partition, new.offset, new.value) == (moved.partition, 1, b"second")
        patient.consumer.resume(both - {moved})
        until(lambda: both_have(4), "the partition that stayed is paused until it is resumed")
    finally:
        producer.close()
