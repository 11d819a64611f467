"""Whole topics, read from their beginning to what is their end now, and how far groups are behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Set
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from alphaloop.kafka.topics import CONTROL, RESULTS
from tests.chaos.ledger import ResultRecord

_WAIT_S: Final = 60.0
_ASK_S: Final = 5.0
_AT_ONCE: Final = 1000
_PASSING_S: Final = 0.2


class TopicReader:
    """Asks with consumers that join no group.

    Not with an admin client: the assertions of librdkafka 2.16 end the process when a broker is lost while its admin
    client asks for the offsets of a group.
    """

    def __init__(self, addresses: str, gone_ids: Set[str] = frozenset()) -> None:
        """`gone_ids` are what was committed beside the offsets of topics that are no more."""
        self._addresses = addresses
        self._gone_ids = gone_ids
        self._clients: dict[str, Consumer] = {}

    def topics(self) -> dict[str, int]:
        """The number of partitions of every topic. Raises KafkaException without a broker."""
        found = self._client("chaos-reader").list_topics(timeout=_ASK_S).topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def read(self, topic: str) -> list[Message]:
        """Every message; none where the topic does not exist. Raises TimeoutError when the brokers are too slow."""
        return list(self.stream(topic))

    def stream(self, topic: str) -> Iterator[Message]:
        """The same, one by one. Raises TimeoutError when none comes for long."""
        ends = self.end_offsets(topic)
        num_wanted, num_read = sum(ends.values()), 0
        reader = self._new_client("chaos-reader")
        try:
            reader.assign([TopicPartition(topic, number, 0) for number in ends])
            deadline = time.monotonic() + _WAIT_S
            while num_read < num_wanted:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"read {num_read} of {num_wanted} messages of {topic}, then none in {_WAIT_S:.0f} s"
                    )
                for message in reader.consume(_AT_ONCE, 0.5):
                    if message.error() is None:
                        num_read, deadline = num_read + 1, time.monotonic() + _WAIT_S
                        yield message
        finally:
            reader.close()

    def results(self) -> list[ResultRecord]:
        """The results topic."""
        return [ResultRecord(key_of(message), message.value() or b"") for message in self.read(RESULTS)]

    def end_offsets(self, topic: str, *, wait_s: float = _WAIT_S) -> dict[int, int]:
        """The offset of the next message, by partition; empty where the topic does not exist.

        Raises KafkaException when the brokers do not answer for `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return {number: self._end(topic, number) for number in range(self.topics().get(topic, 0))}
            except KafkaException:
                # After a broker's start the leaders of partitions are not known to everybody yet.
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PASSING_S)

    def committed(self, group: str) -> dict[TopicPartition, int]:
        """What the group has committed of topics as they are now, where it has. Raises KafkaException."""
        wanted = [
            TopicPartition(topic, n) for topic, num in self.topics().items() if _is_read(topic) for n in range(num)
        ]
        answers = self._client(group).committed(wanted, timeout=_ASK_S)
        valid = [one for one in answers if one.error is None and one.metadata not in self._gone_ids]
        return {one: one.offset for one in valid if one.offset >= 0}

    def lag(self, group: str) -> Mapping[str, int]:
        """How many messages of the jobs topics the group has not committed, by topic[partition]."""
        committed = {(one.topic, one.partition): offset for one, offset in self.committed(group).items()}
        return {
            f"{topic}[{number}]": end - committed.get((topic, number), 0)
            for topic in self.topics()
            if topic.startswith("jobs.") and _is_read(topic)
            for number, end in self.end_offsets(topic).items()
        }

    def delete(self, topic: str) -> None:
        """Delete a topic and everything on it."""
        admin = AdminClient({"bootstrap.servers": self._addresses, "log_level": 0})
        admin.delete_topics([topic])[topic].result(_WAIT_S)

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients.values():
            client.close()

    def _end(self, topic: str, number: int) -> int:
        found = self._client("chaos-reader").get_watermark_offsets(TopicPartition(topic, number), timeout=_ASK_S)
        if found is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return int(found[1])

    def _client(self, group: str) -> Consumer:
        if group not in self._clients:
            self._clients[group] = self._new_client(group)
        return self._clients[group]

    def _new_client(self, group: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._addresses,
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )


def _is_read(topic: str) -> bool:
    """Whether workers read it."""
    return topic == CONTROL or (topic.startswith("jobs.") and not topic.endswith(".dlq"))


def key_of(message: Message) -> str:
    """A message's key as text."""
    return (message.key() or b"").decode()
