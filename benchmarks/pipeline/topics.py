"""The benchmark's topics: made, filled, and read back with the broker's own clock."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

NUM_PARTITIONS: Final = 8
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Results:
    """What one contestant put on the results topic."""

    keys: tuple[str, ...]
    appended_ms: tuple[int, ...]  #: the broker's clock, in the order of `keys`


class Topics:
    """One broker's topics. All carry the broker's clock, not the sender's."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self._reader = self.reader()

    def create(self, *names: str) -> None:
        """Make topics of NUM_PARTITIONS partitions."""
        config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(4 << 20)}
        wanted = [NewTopic(name, num_partitions=NUM_PARTITIONS, replication_factor=1, config=config) for name in names]
        for answer in self._admin.create_topics(wanted).values():
            answer.result(WAIT_S)

    def delete(self, name: str) -> None:
        """Delete a topic, and wait until nobody is told of it any more."""
        for answer in self._admin.delete_topics([name]).values():
            answer.result(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while name in self._admin.list_topics(timeout=WAIT_S).topics:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the topic {name} is still there after {WAIT_S:.0f} s")
            time.sleep(0.1)

    def fill(self, topic: str, messages: Iterable[tuple[str, bytes]]) -> None:
        """Send keyed messages, and wait until the broker has all of them."""
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 20, "acks": "all"})
        for key, value in messages:
            while True:
                try:
                    producer.produce(topic, key=key, value=value)
                    break
                except BufferError:
                    producer.poll(0.1)
        if left := producer.flush(WAIT_S):
            raise TimeoutError(f"{left} messages were not taken by the broker within {WAIT_S:.0f} s")

    def ends(self, topic: str) -> dict[int, int]:
        """By partition, the offset of the next message."""
        return {
            partition: self._reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=WAIT_S)[1]
            for partition in range(NUM_PARTITIONS)
        }

    def reader(self) -> Consumer:
        """A consumer that joins no group."""
        return Consumer(
            {
                "bootstrap.servers": self.servers,
                "log_level": 0,
                "group.id": "nobody",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
            }
        )

    def read(self, topic: str, begins: Mapping[int, int]) -> Results:
        """Everything from these offsets to the present end."""
        num_wanted = sum(self.ends(topic).values()) - sum(begins.values())
        reader, found = self.reader(), list[Any]()
        reader.assign([TopicPartition(topic, partition, offset) for partition, offset in begins.items()])
        deadline = time.monotonic() + WAIT_S
        while len(found) < num_wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"read {len(found)} of {num_wanted} messages of {topic} in {WAIT_S:.0f} s")
            for message in reader.consume(1000, 0.5):
                if message.error() is not None:
                    raise RuntimeError(f"reading {topic}: {message.error()}")
                found.append(message)
        reader.close()
        return Results(
            tuple((message.key() or b"").decode() for message in found),
            tuple(message.timestamp()[1] for message in found),
        )
