"""Producers with transactions: their markers and aborted messages are offsets, and no messages, to every reader."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import confluent_kafka as ck
import pytest

from alphaloop.dead_letters.reading import DeadLetterFilter, refusals_of
from alphaloop.kafka import backlog
from alphaloop.kafka.backlog import search, unfinished
from alphaloop.kafka.client import bootstrap_servers
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import TOKENS, ensure_topic, ensure_topics
from alphaloop.messages import Chunk, chunk_headers, text_chunk
from alphaloop.messages.topics import dlq_topic, high_topic, jobs_topic
from alphaloop.outcomes.reading import text_so_far
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import intake_of, lag
from tests.fixtures.worker import WAIT_S, Sender, until
from worker.intake.polling import Intake

pytestmark = pytest.mark.kafka

#: A reader that has read everything ends at once; one that waits for a last message that never comes takes longer.
AT_ONCE_S = 4.0


class Transactions:
    """A producer with transactions, as a user's."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._client = ck.Producer(
            {"bootstrap.servers": bootstrap_servers(kafka), "transactional.id": uuid.uuid4().hex}
        )
        self._client.init_transactions(WAIT_S)

    def begin(self, partition: TopicPartition, values: Sequence[bytes]) -> None:
        """Messages that the broker has, of a transaction that is open."""
        self._client.begin_transaction()
        for value in values:
            self._client.produce(partition.topic, value, partition=partition.partition)
        assert self._client.flush(WAIT_S) == 0

    def abort_open(self) -> None:
        """Leave none open."""
        with contextlib.suppress(ck.KafkaException):  # none is
            self._client.abort_transaction(WAIT_S)

    def commit(self, partition: TopicPartition, values: Sequence[bytes]) -> None:
        self.begin(partition, values)
        self._client.commit_transaction(WAIT_S)

    def abort(self, partition: TopicPartition, values: Sequence[bytes]) -> None:
        self.begin(partition, values)
        self._client.abort_transaction(WAIT_S)


@pytest.fixture
def kafka(kafka_settings: KafkaSettings, fresh_prefix: str) -> KafkaSettings:
    """Settings of a group and a task of this test's own."""
    ensure_topics(kafka_settings, [fresh_prefix], high=[fresh_prefix])
    ensure_topic(kafka_settings, dlq_topic(jobs_topic(fresh_prefix)))
    return kafka_settings.model_copy(update={"group_id": fresh_prefix})


@pytest.fixture
def transactions(kafka: KafkaSettings) -> Iterator[Transactions]:
    transactions = Transactions(kafka)
    yield transactions
    transactions.abort_open()


@pytest.fixture
def partition(kafka: KafkaSettings) -> TopicPartition:
    return TopicPartition(jobs_topic(kafka.group_id), 0)


@pytest.fixture
def intake(kafka: KafkaSettings, partition: TopicPartition) -> Iterator[Intake]:
    intake = intake_of(kafka, partition.topic, kafka.group_id)
    intake.start()
    yield intake
    intake.close(WAIT_S)


def jobs(*names: str) -> list[bytes]:
    return [json.dumps({"job_id": name, "prompt": "p"}).encode() for name in names]


def number_of(kafka: KafkaSettings) -> int:
    return unfinished(kafka)[kafka.group_id].num_messages


def test_an_aborted_transaction_leaves_nothing_that_waits(
    kafka: KafkaSettings, transactions: Transactions, partition: TopicPartition, intake: Intake
) -> None:
    transactions.abort(partition, jobs(*map(str, range(150))))
    until(lambda: lag(kafka, kafka.group_id, partition) == 0, "the group's lag is 0", WAIT_S)
    transactions.commit(partition, jobs("a", "b"))
    transactions.abort(partition, jobs("c"))
    taken = []
    while len(taken) < 2:
        taken += intake.take(10, WAIT_S)
    assert [json.loads(one.record.value or b"")["job_id"] for one in taken] == ["a", "b"]
    intake.finish(taken[1:])
    assert lag(kafka, kafka.group_id, partition) > 0, "the first one still runs"
    intake.finish(taken[:1])
    until(lambda: lag(kafka, kafka.group_id, partition) == 0, "the group's lag is 0 again", WAIT_S)


def test_messages_are_counted_and_not_offsets(
    kafka: KafkaSettings, transactions: Transactions, partition: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions.abort(partition, jobs(*map(str, range(50))))
    assert number_of(kafka) == 0, "only aborted ones"
    assert unfinished(kafka)[kafka.group_id].oldest_s is None
    for number in range(5):
        transactions.commit(partition, jobs(f"a{number}"))
        transactions.abort(partition, jobs("no", "no"))
    transactions.commit(TopicPartition(high_topic(kafka.group_id), 0), jobs("h"))
    transactions.begin(partition, jobs("open"))
    assert number_of(kafka) == 6
    assert 0 < (unfinished(kafka)[kafka.group_id].oldest_s or 0.0) < WAIT_S
    monkeypatch.setattr(backlog, "_MOST_COUNTED", 3)
    assert number_of(kafka) == 26, "of a long partition offsets count, from its first message to where one is open"


def test_readers_end_where_the_last_offsets_hold_no_message(
    kafka: KafkaSettings, transactions: Transactions, partition: TopicPartition
) -> None:
    """Searches, readers of dead letters, and those of a text."""
    a, b, no, still_open = (f"{kafka.group_id}-{name}" for name in ("a", "b", "no", "open"))
    letters = TopicPartition(dlq_topic(partition.topic), 0)
    transactions.commit(letters, jobs("a"))
    transactions.abort(letters, jobs("no", "no"))
    chunk = Chunk(a, 1, 0, "half a ")
    headers = [(name, text.encode()) for name, text in chunk_headers(chunk, {}).items()]
    Sender(kafka).send(TOKENS, [text_chunk(chunk, created=0, model="m")], [a.encode()], headers=headers, partition=0)
    transactions.abort(TopicPartition(TOKENS, 0), jobs("no"))
    transactions.abort(partition, jobs(no))
    transactions.commit(partition, jobs(a, b))
    transactions.abort(partition, jobs(*[no] * 50))
    transactions.begin(partition, jobs(still_open))
    with at_once():
        found = search(kafka, lambda job_id, _: job_id.startswith(kafka.group_id))
        assert [(one.job_id, one.num_before) for one in found] == [(a, 0), (b, 1)]
    with at_once():
        dead = list(DeadLetterFilter(task=kafka.group_id).letters(kafka))
        assert [json.loads(one.record.value or b"")["job_id"] for one in dead] == ["a"]
        places = frozenset(f"{letters.topic}:0:{offset}" for offset in range(4))
        assert [one.record.offset for one in DeadLetterFilter(task=kafka.group_id, places=places).letters(kafka)] == [0]
        assert refusals_of(kafka, ["nobody"]) == {}
    with at_once():
        text = text_so_far(kafka, a, datetime.now(UTC) - timedelta(minutes=1))
        assert text.text == "half a "


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < AT_ONCE_S
