"""A member pauses a partition, loses it to another member and gets it back: it reads on where the group has got to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import Member, pump, send

pytestmark = pytest.mark.kafka


class Patient(Member):
    """The member that stays. It notes what positions partitions have when they come."""

    def __init__(self, kafka: KafkaSettings, group: str, topic: str) -> None:
        self.at_assignment: list[dict[TopicPartition, int]] = []
        super().__init__(kafka, group, topic)

    def note(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        if what == "assign":
            self.at_assignment.append(self.consumer.positions(partitions))
        super().note(what, partitions)


@pytest.fixture
def patient(kafka_settings: KafkaSettings, fresh_prefix: str) -> Iterator[Patient]:
    ensure_topics(kafka_settings, [fresh_prefix])
    member = Patient(kafka_settings, fresh_prefix, jobs_topic(fresh_prefix))
    yield member
    member.consumer.close()


def test_a_partition_that_was_paused_is_read_when_it_comes_back(
    patient: Patient, kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    """It has no position then; else a worker would pass over messages that it delivered before and did not finish."""
    topic = jobs_topic(fresh_prefix)
    both = {TopicPartition(topic, 0), TopicPartition(topic, 1)}

    def send_to_both(value: bytes) -> None:
        for number in (0, 1):
            send(kafka_settings, topic, [value], number)

    send_to_both(b"first")
    pump([patient], lambda: len(patient.records) == 2, "both partitions are read")
    assert set(patient.consumer.positions(both).values()) == {1}
    patient.consumer.pause(both)
    patient.consumer.commit(dict.fromkeys(both, 1))
    other = Member(kafka_settings, fresh_prefix, topic)
    pump([patient, other], lambda: len(patient.owned) == len(other.owned) == 1, "each member has a partition")
    (moved,) = other.owned
    other.consumer.close()
    pump([patient], lambda: patient.owned == both, "the partition came back")
    assert len(patient.at_assignment) >= 2
    assert not any(patient.at_assignment)
    send_to_both(b"second")
    pump([patient], lambda: len(patient.records) == 3, "the partition that came back is read")
    new = patient.records[2]
    assert (new.partition, new.offset, new.value) == (moved.partition, 1, b"second")
    patient.consumer.resume(both - {moved})
    pump([patient], lambda: len(patient.records) == 4, "the partition that stayed is paused until it is resumed")
