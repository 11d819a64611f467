"""What a run counts as committed, against a real broker."""

from __future__ import annotations

import confluent_kafka as ck
import pytest

from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.chaos.reading import TopicReader

pytestmark = pytest.mark.kafka


def test_what_is_committed_beside_the_id_of_a_topic_that_is_gone_counts_for_nobody(
    kafka_settings: KafkaSettings, fresh_prefix: str
) -> None:
    topic, group = jobs_topic(fresh_prefix), fresh_prefix
    ensure_topics(kafka_settings, [fresh_prefix])
    producer = Producer(kafka_settings)
    for partition in (0, 1):
        producer.send(topic, key=None, value=b"1", partition=partition)
    producer.flush(30)
    producer.close()
    addresses = kafka_settings.bootstrap_servers or ""
    committer = ck.Consumer({"bootstrap.servers": addresses, "group.id": group, "enable.auto.commit": False})
    offsets = [
        ck.TopicPartition(topic, 0, 7, metadata="topic_id=old"),
        ck.TopicPartition(topic, 1, 1, metadata="topic_id=new"),
    ]
    committer.commit(offsets=offsets, asynchronous=False)
    committer.close()
    reader = TopicReader(addresses, {"topic_id=old"})
    try:
        found = {one.partition: offset for one, offset in reader.committed(group).items() if one.topic == topic}
        lag = reader.lag(group)
    finally:
        reader.close()
    assert found == {1: 1}
    assert (lag[f"{topic}[0]"], lag[f"{topic}[1]"]) == (1, 0)
