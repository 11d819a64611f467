"""The benchmark's topics: filled with jobs that are all alike, read back with the broker's own clock, and checked.

A run that did not do what it was timed for counts for nothing and ends the benchmark.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

NUM_BYTES: Final = 400
_WORDS: Final = (
    *("order", "parcel", "invoice", "shipping", "refund", "customer", "harbour", "station", "number", "morning"),
    *("evening", "window", "letter", "answer", "question", "address"),
)


def jobs(num_jobs: int, *, prefix: str, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(job_id, message), each message of NUM_BYTES bytes or a few more."""
    rng = random.Random(seed)
    for number in range(num_jobs):
        job_id = f"{prefix}-{number:07d}"
        yield job_id, _message(job_id, rng)


def _message(job_id: str, rng: random.Random) -> bytes:
    text = "Summarize in one word:"
    while True:
        value = json.dumps({"job_id": job_id, "prompt": text, "max_tokens": 1}).encode()
        if len(value) >= NUM_BYTES:
            return value
        text += " " + rng.choice(_WORDS)


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


class NotDone(RuntimeError):
    """Results or rows are missing, or there are too many."""


def check_results(name: str, wanted: Collection[str], found: Sequence[str]) -> int:
    """Every job's result arrived; returns how many arrived more than once. Raises NotDone."""
    keys, wanted = set(found), set(wanted)
    if keys != wanted:
        raise NotDone(
            f"{name}: {len(wanted - keys)} of {len(wanted)} results are missing, {len(keys - wanted)} belong to no job"
        )
    return len(found) - len(keys)


def check_rows(name: str, database_url: str, table: str, wanted: Collection[str]) -> None:
    """Every job has exactly one row that says it succeeded. Raises NotDone."""
    query = sql.SQL("SELECT job_id FROM {} WHERE status = 'succeeded'").format(sql.Identifier(table))
    with psycopg.connect(database_url) as connection:
        rows = [row[0] for row in connection.execute(query)]
    missing = set(wanted) - set(rows)
    if missing or len(rows) != len(set(wanted)):
        raise NotDone(f"{name}: {len(rows)} rows for {len(set(wanted))} jobs, {len(missing)} jobs without one")


def check_outbox(name: str, database_url: str) -> None:
    """Nothing that was recorded waits to be published. Raises NotDone."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    if row is None or row[0] != 0:
        raise NotDone(f"{name}: {row and row[0]} results are still in the outbox")
