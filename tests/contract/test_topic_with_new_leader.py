"""A topic is deleted and made anew, and another broker leads it: who wrote to it before goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from alphaloop.errors import BrokerError
from alphaloop.kafka.producer import Producer
from tests.chaos.brokers import Brokers
from tests.fixtures.broker import settings_for
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka

TOPIC: Final = "results"
WAIT_S: Final = 60.0


@pytest.fixture
def brokers(kafka_home: Path, tmp_path: Path) -> Iterator[Brokers]:
    """Three of this test's own."""
    brokers = Brokers(kafka_home, tmp_path, 3)
    try:
        brokers.start()
        yield brokers
    finally:
        brokers.stop()


def make(admin: AdminClient, replicas: Sequence[Sequence[int]]) -> None:
    """The topic, its partitions on these nodes, led by the first of each."""
    topic = NewTopic(
        TOPIC,
        num_partitions=len(replicas),
        replica_assignment=[list(nodes) for nodes in replicas],
        config={"min.insync.replicas": "1"},
    )
    until(lambda: TOPIC not in admin.list_topics(timeout=WAIT_S).topics, "the topic is gone")
    admin.create_topics([topic])[TOPIC].result(WAIT_S)


def test_a_producer_finds_the_new_leader_of_a_topic_made_anew(brokers: Brokers) -> None:
    """librdkafka believes a leader only where its epoch grows, and a topic made anew begins with epoch 0 (#4898)."""
    admin = AdminClient({"bootstrap.servers": brokers.addresses})
    make(admin, [[1, 2], [1, 2]])
    impatient = settings_for(brokers.addresses).model_copy(update={"extra": {"delivery.timeout.ms": 3000}})
    producer = Producer(impatient)

    def send() -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = []
        for partition in (0, 1):
            producer.send(TOPIC, key=None, value=b"1", partition=partition, on_delivery=outcomes.append)
        producer.flush(WAIT_S)
        return outcomes

    def is_stored() -> bool:
        return send() == [None, None]

    try:
        until(is_stored, "both partitions take messages")
        brokers.kill([0])
        until(is_stored, "node 2 leads both partitions")
        brokers.start([0])
        admin.delete_topics([TOPIC])[TOPIC].result(WAIT_S)
        make(admin, [[3], [1]])
        until(is_stored, "the new leaders take messages")
    finally:
        producer.close()
