"""Deleting the oldest dead letters of each partition, and what is said of them before."""

from __future__ import annotations

from collections import Counter
from typing import Any

from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import delete_before
from alphaloop.letters.choosing import Choice
from alphaloop.settings import KafkaSettings
from alphaloop.store.redrives import RedriveStore


class Purge:
    """What would be deleted: of each partition the records below an offset."""

    def __init__(self, kafka: KafkaSettings, store: RedriveStore) -> None:
        self._kafka = kafka
        self._store = store
        self._codes: dict[TopicPartition, Counter[str]] = {}
        self._offsets: dict[TopicPartition, int] = {}

    @property
    def num_letters(self) -> int:
        """Letters below the offsets."""
        return sum(codes.total() for codes in self._codes.values())

    def read(self, choice: Choice) -> None:
        """Find the offsets: below them lie only letters of the chosen time. Raises BrokerError."""
        ended: set[TopicPartition] = set()
        everything = Choice(choice.task)
        for letter in everything.letters(self._kafka):
            partition = letter.record.topic_partition
            if partition in ended or not choice.holds(letter):
                ended.add(partition)  # younger letters, and older ones behind them, stay
                continue
            self._codes.setdefault(partition, Counter())[letter.code] += 1
            self._offsets[partition] = letter.record.offset + 1

    def carry_out(self) -> None:
        """Delete them, and forget which of them were sent again. Raises BrokerError, StoreError."""
        delete_before(self._kafka, self._offsets)
        for partition, offset in self._offsets.items():
            self._store.forget_before(partition.topic, partition.partition, offset)

    def rows(self) -> list[str]:
        """For people, a line a partition."""
        if not self._offsets:
            return ["no dead letters are that old"]
        rows = []
        for partition, codes in sorted(self._codes.items()):
            where = f"{partition.topic}[{partition.partition}] below offset {self._offsets[partition]}"
            by_code = ", ".join(f"{number} {code}" for code, number in codes.most_common())
            rows.append(f"{where}: {codes.total()} letters ({by_code})")
        return rows

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "letters": self.num_letters,
            "partitions": [
                {
                    "topic": partition.topic,
                    "partition": partition.partition,
                    "below_offset": self._offsets[partition],
                    "codes": dict(codes),
                }
                for partition, codes in sorted(self._codes.items())
            ],
        }
