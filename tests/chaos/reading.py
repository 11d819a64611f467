"""Whole topics, read from their beginning to what is their end now, and how far groups are behind it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from alphaloop.kafka.topics import RESULTS
from tests.chaos.ledger import ResultRecord

_WAIT_S: Final = 60.0
_AT_ONCE: Final = 1000
_PASSING_S: Final = 0.2


class TopicReader:
    """One client for all questions: a client that is thrown away takes its open answers with it."""

    def __init__(self, addresses: str) -> None:
        self._addresses = addresses
        self._admin = AdminClient({"bootstrap.servers": addresses, "log_level": 0})

    def topics(self) -> list[str]:
        """The names of all topics."""
        return list(self._admin.list_topics(timeout=_WAIT_S).topics)

    def read(self, topic: str) -> list[Message]:
        """Every message; none where the topic does not exist. Raises TimeoutError when the brokers are too slow."""
        ends = self.end_offsets(topic)
        num_wanted = sum(ends.values())
        if not num_wanted:
            return []
        reader = Consumer(
            {
                "bootstrap.servers": self._addresses,
                "group.id": "chaos-reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        try:
            reader.assign([TopicPartition(topic, number, 0) for number in ends])
            found: list[Message] = []
            deadline = time.monotonic() + _WAIT_S
            while len(found) < num_wanted:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"read {len(found)} of {num_wanted} messages of {topic} in {_WAIT_S:.0f} s")
                found += [message for message in reader.consume(_AT_ONCE, 0.5) if message.error() is None]
            return found
        finally:
            reader.close()

    def results(self) -> list[ResultRecord]:
        """The results topic."""
        return [ResultRecord(key_of(message), message.value() or b"") for message in self.read(RESULTS)]

    def end_offsets(self, topic: str) -> dict[int, int]:
        """The offset of the next message, by partition; empty where the topic does not exist."""
        # All topics are asked for, because asking for one by name tells some brokers to create it.
        known = self._admin.list_topics(timeout=_WAIT_S).topics.get(topic)
        if known is None:
            return {}
        asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in known.partitions}
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                answers = self._admin.list_offsets(asked, request_timeout=_WAIT_S)
                return {one.partition: answer.result(_WAIT_S).offset for one, answer in answers.items()}
            except KafkaException:
                # After a broker's start the leaders of partitions are not known to everybody yet.
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PASSING_S)

    def lag(self, group: str) -> Mapping[str, int]:
        """How many messages of the jobs topics the group has not committed, by topic[partition]."""
        asked = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        committed = {(one.topic, one.partition): one.offset for one in asked[group].result(_WAIT_S).topic_partitions}
        behind = {}
        for topic in self.topics():
            if topic.startswith("jobs.") and not topic.endswith(".dlq"):
                for number, end in self.end_offsets(topic).items():
                    behind[f"{topic}[{number}]"] = end - max(0, committed.get((topic, number), 0))
        return behind

    def delete(self, topic: str) -> None:
        """Delete a topic and everything on it."""
        self._admin.delete_topics([topic])[topic].result(_WAIT_S)


def key_of(message: Message) -> str:
    """A message's key as text."""
    return (message.key() or b"").decode()
