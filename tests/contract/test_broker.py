"""What alphaloop needs of a broker, asked of each broker that it can start itself."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from confluent_kafka import cimpl

from alphaloop.embedded.stack import FALLBACK_NOTICE
from alphaloop.errors import BrokerError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS, cluster_id, ensure_topics, is_reachable, list_topics
from alphaloop.messages.topics import dlq_topic, jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.missing import missing

WITHIN_S = 60.0


class Member:
    """A group member that remembers what it was given, what was taken, and what it read."""

    def __init__(self, kafka: KafkaSettings, group: str, patterns: Sequence[str]) -> None:
        self.consumer = Consumer(kafka, group_id=group)
        self.owned: set[TopicPartition] = set()
        self.revocations: list[set[TopicPartition]] = []
        self.records: list[Record] = []
        self.next_offsets: dict[TopicPartition, int] = {}
        self.consumer.subscribe(
            patterns,
            on_assign=self._given,
            on_revoke=self._taken,
            on_lost=lambda gone: self.owned.difference_update(gone),
        )

    def _given(self, partitions: Sequence[TopicPartition]) -> None:
        self.owned.update(partitions)

    def _taken(self, partitions: Sequence[TopicPartition]) -> None:
        self.revocations.append(set(partitions))
        self.consumer.commit({tp: self.next_offsets.pop(tp) for tp in partitions if tp in self.next_offsets})
        self.owned.difference_update(partitions)

    def poll(self, timeout_s: float = 0.1) -> None:
        if (record := self.consumer.poll(timeout_s)) is not None:
            self.records.append(record)
            self.next_offsets[record.topic_partition] = record.offset + 1


@contextmanager
def member(kafka: KafkaSettings, group: str, *patterns: str) -> Iterator[Member]:
    one = Member(kafka, group, patterns)
    try:
        yield one
    finally:
        one.consumer.close()


def pump(members: Sequence[Member], until: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    """Poll everybody until the condition holds."""
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < within_s, "the condition did not come true in time"
        for one in members:
            one.poll()


def read_all(kafka: KafkaSettings, topic: str, count: int) -> list[Record]:
    """The first `count` records of a topic, read without a group."""
    reader = Consumer(kafka, group_id="nobody")
    try:
        reader.assign_from([topic], at="earliest")
        records: list[Record] = []
        deadline = time.monotonic() + WITHIN_S
        while len(records) < count:
            assert time.monotonic() < deadline, f"{len(records)} of {count} records came"
            if (record := reader.poll(0.5)) is not None:
                records.append(record)
        return records
    finally:
        reader.close()


@contextmanager
def producer(kafka: KafkaSettings) -> Iterator[Producer]:
    one = Producer(kafka)
    try:
        yield one
    finally:
        one.close()


def fill(kafka: KafkaSettings, topic: str, values: Sequence[bytes], partition: int | None = None) -> None:
    with producer(kafka) as one:
        for value in values:
            one.send(topic, key=value, value=value, partition=partition)
        one.flush(30)


@pytest.fixture
def topic(broker_settings: KafkaSettings, fresh_prefix: str) -> str:
    """A jobs topic of this test's own, with two partitions."""
    ensure_topics(broker_settings, [fresh_prefix])
    return jobs_topic(fresh_prefix)


def broker_of(request: pytest.FixtureRequest) -> str:
    """Which broker this run of the test speaks to: `kafka` or `tansu`."""
    return str(request.node.callspec.id)


def partitions_of(topic: str) -> set[TopicPartition]:
    return {TopicPartition(topic, 0), TopicPartition(topic, 1)}


def test_topics_are_created_once(broker_settings: KafkaSettings, fresh_prefix: str) -> None:
    created = ensure_topics(broker_settings, [fresh_prefix])
    name = jobs_topic(fresh_prefix)
    assert {name, dlq_topic(name)} <= set(created)
    assert ensure_topics(broker_settings, [fresh_prefix]) == []
    assert {name, dlq_topic(name), RESULTS} <= set(list_topics(broker_settings))


def test_a_cluster_has_a_name_and_answers(broker_settings: KafkaSettings) -> None:
    assert is_reachable(broker_settings, 30.0)
    assert cluster_id(broker_settings) == cluster_id(broker_settings) != ""


def test_keys_values_and_headers_arrive_as_sent_and_in_order(broker_settings: KafkaSettings, topic: str) -> None:
    headers = [("ce_id", b"1"), ("empty", b""), ("ce_id", b"again"), ("binary", bytes(range(256)))]
    with producer(broker_settings) as one:
        for i in range(500):
            one.send(topic, key=b"k%d" % i, value=b"v%d" % i, headers=headers, partition=0)
        one.send(topic, key=None, value=None, partition=0)
        one.flush(30)
        assert one.num_pending == 0
    records = read_all(broker_settings, topic, 501)
    assert [record.offset for record in records] == list(range(501))
    assert [(record.key, record.value) for record in records[:500]] == [(b"k%d" % i, b"v%d" % i) for i in range(500)]
    assert {record.headers for record in records[:500]} == {tuple(headers)}
    assert (records[500].key, records[500].value, records[500].headers) == (None, None, ())
    assert abs((records[0].timestamp_ms or 0) / 1000 - time.time()) < 600


def test_a_message_of_a_megabyte_arrives_whole(broker_settings: KafkaSettings, topic: str) -> None:
    value = bytes(range(256)) * (1 << 12)
    fill(broker_settings, topic, [value, value + b"!"], partition=0)
    assert [record.value for record in read_all(broker_settings, topic, 2)] == [value, value + b"!"]


def test_watermarks_tell_what_is_kept(
    broker_settings: KafkaSettings, topic: str, request: pytest.FixtureRequest
) -> None:
    if broker_of(request) == "tansu":
        request.applymarker(
            pytest.mark.xfail(strict=True, reason="Tansu 0.6.0 counts the newest batch as one message: (0, 1) here")
        )
    fill(broker_settings, topic, [b"a", b"b", b"c"], partition=1)
    reader = Consumer(broker_settings, group_id="nobody")
    try:
        assert reader.bounds([topic])[TopicPartition(topic, 0)] == (0, 0)
        assert reader.bounds([topic])[TopicPartition(topic, 1)] == (0, 3)
    finally:
        reader.close()


def test_reading_from_the_end_misses_nothing_new(
    broker_settings: KafkaSettings, topic: str, request: pytest.FixtureRequest
) -> None:
    fill(broker_settings, topic, [b"old"] * 3, partition=0)
    reader = Consumer(broker_settings, group_id="nobody")
    try:
        reader.assign_from([topic], at="latest")
        fill(broker_settings, topic, [b"new"], partition=0)
        values: list[bytes | None] = []
        deadline = time.monotonic() + WITHIN_S
        while b"new" not in values and time.monotonic() < deadline:
            if (record := reader.poll(0.5)) is not None:
                values.append(record.value)
        # Tansu's end lies inside its newest batch, so a reader there must tell old from new by the key.
        assert values == ([b"new"] if broker_of(request) == "kafka" else [b"old", b"old", b"new"])
    finally:
        reader.close()


def test_reading_since_a_time_misses_nothing_that_is_newer(broker_settings: KafkaSettings, topic: str) -> None:
    fill(broker_settings, topic, [b"old"] * 3, partition=0)
    newest_ms = max(record.timestamp_ms or 0 for record in read_all(broker_settings, topic, 3))
    since = datetime.fromtimestamp((newest_ms + 1) / 1000, UTC)
    reader = Consumer(broker_settings, group_id="nobody")
    try:
        until_after(newest_ms)
        fill(broker_settings, topic, [b"new"], partition=0)
        reader.assign_since([topic], since)
        fill(broker_settings, topic, [b"newest"], partition=1)
        values: set[bytes | None] = set()
        deadline = time.monotonic() + WITHIN_S
        while not values >= {b"new", b"newest"}:
            assert time.monotonic() < deadline, f"only {values} came"
            if (record := reader.poll(0.5)) is not None:
                values.add(record.value)
    finally:
        reader.close()


def until_after(moment_ms: int) -> None:
    """Wait until the clock that stamps messages has passed a moment of the near past."""
    while time.time() * 1000 <= moment_ms + 1:
        pass


def test_reading_a_topic_that_is_not_there_is_refused(broker_settings: KafkaSettings, fresh_prefix: str) -> None:
    reader = Consumer(broker_settings, group_id="nobody")
    try:
        with pytest.raises(BrokerError, match=jobs_topic(fresh_prefix)):
            reader.assign_from([jobs_topic(fresh_prefix)], at="earliest")
    finally:
        reader.close()


def test_a_new_client_goes_on_after_the_committed_offset(
    broker_settings: KafkaSettings, topic: str, fresh_prefix: str
) -> None:
    fill(broker_settings, topic, [b"%d" % i for i in range(10)], partition=0)
    partition = TopicPartition(topic, 0)
    with member(broker_settings, fresh_prefix, topic) as first:
        pump([first], until=lambda: len(first.records) == 10)
        assert first.consumer.committed([partition]) == {partition: None}
        first.consumer.commit({partition: 4})
        first.next_offsets.clear()  # nothing more is committed when it leaves
        assert first.consumer.committed([partition]) == {partition: 4}
    with member(broker_settings, fresh_prefix, topic) as second:
        pump([second], until=lambda: len(second.records) == 6)
        assert [record.offset for record in second.records] == [4, 5, 6, 7, 8, 9]


def test_a_paused_partition_is_silent_until_resumed(
    broker_settings: KafkaSettings, topic: str, fresh_prefix: str
) -> None:
    with member(broker_settings, fresh_prefix, topic) as one:
        pump([one], until=lambda: one.owned == partitions_of(topic))
        quiet = TopicPartition(topic, 0)
        one.consumer.pause([quiet])
        fill(broker_settings, topic, [b"quiet"] * 5, partition=0)
        fill(broker_settings, topic, [b"loud"] * 5, partition=1)
        pump([one], until=lambda: len(one.records) >= 5)
        for _ in range(5):
            one.poll(0.2)
        assert [record.value for record in one.records] == [b"loud"] * 5
        one.consumer.resume([quiet])
        pump([one], until=lambda: len(one.records) == 10)
        assert [record.value for record in one.records[5:]] == [b"quiet"] * 5


def test_members_share_a_topic_and_take_over_without_loss(
    broker_settings: KafkaSettings, topic: str, fresh_prefix: str
) -> None:
    with member(broker_settings, fresh_prefix, topic) as first:
        pump([first], until=lambda: first.owned == partitions_of(topic))
        fill(broker_settings, topic, [b"%d" % i for i in range(100)])
        pump([first], until=lambda: len(first.records) == 100)
        with member(broker_settings, fresh_prefix, topic) as second:
            pump([first, second], until=lambda: len(first.owned) == len(second.owned) == 1)
            assert first.owned | second.owned == partitions_of(topic)
            # Cooperative: only the partition that moves is taken, the other is read on without a break.
            assert first.revocations == [second.owned]
            fill(broker_settings, topic, [b"%d" % i for i in range(100, 200)])
            pump([first, second], until=lambda: len(first.records) + len(second.records) >= 200)
        pump([first], until=lambda: first.owned == partitions_of(topic))
        fill(broker_settings, topic, [b"%d" % i for i in range(200, 300)])
        pump([first], until=lambda: len(first.records) + len(second.records) >= 300)
    read = sorted(int(record.value or b"") for record in first.records + second.records)
    assert read == list(range(300))


def test_a_pattern_sees_a_topic_that_is_made_later(broker_settings: KafkaSettings, fresh_prefix: str) -> None:
    ensure_topics(broker_settings, [fresh_prefix])
    with member(broker_settings, fresh_prefix, rf"^jobs\.{fresh_prefix}[a-z0-9_-]*$") as one:
        pump([one], until=lambda: len(one.owned) == 2)
        ensure_topics(broker_settings, [f"{fresh_prefix}-later"])
        later = jobs_topic(f"{fresh_prefix}-later")
        pump([one], until=lambda: partitions_of(later) <= one.owned)
        fill(broker_settings, later, [b"1"])
        pump([one], until=lambda: len(one.records) == 1)
        assert one.records[0].topic == later
        assert {tp.topic for tp in one.owned} == {jobs_topic(fresh_prefix), later}, "dead letters are not jobs"


def test_many_records_are_polled_at_once_in_their_order(broker_settings: KafkaSettings, topic: str) -> None:
    fill(broker_settings, topic, values := [b"%d" % number for number in range(20)], partition=0)
    reader = Consumer(broker_settings, group_id="nobody")
    reader.assign_from([topic], at="earliest")
    found: list[list[Record]] = []
    deadline = time.monotonic() + WITHIN_S
    while sum(map(len, found)) < len(values):
        assert time.monotonic() < deadline, "the records did not come in time"
        found.append(reader.poll_many(8, 0.5))
    assert reader.poll_many(8, 0.0) == []
    reader.close()
    assert [record.value for records in found for record in records] == values
    assert 1 < max(map(len, found)) <= 8


WAIT_S = 30.0
#: So many that the interpreter specialises what reads them: what is called often is called in another way.
NUM_BEFORE = 100
# Of rd_kafka_producev, which takes pairs of a tag and its values up to the end.
END, TOPIC, VALUE, HEADERS = 0, 1, 4, 10


def send_with_header(servers: str, topic: str, value: bytes, name: bytes) -> None:
    """Send by the C client itself, because the Python one takes header names as text only."""
    library = ctypes.CDLL(cimpl.__file__)
    for made in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, made).restype = ctypes.c_void_p
    why = ctypes.create_string_buffer(512)
    config = ctypes.c_void_p(library.rd_kafka_conf_new())
    assert library.rd_kafka_conf_set(config, b"bootstrap.servers", servers.encode(), why, 512) == 0, why.value
    assert library.rd_kafka_conf_set(config, b"log_level", b"0", why, 512) == 0, why.value
    client = ctypes.c_void_p(library.rd_kafka_new(0, config, why, 512))
    try:
        headers = ctypes.c_void_p(library.rd_kafka_headers_new(1))
        length = ctypes.c_ssize_t(len(name))
        assert library.rd_kafka_header_add(headers, name, length, b"v", ctypes.c_ssize_t(1)) == 0
        tags = {tag: ctypes.c_int(tag) for tag in (END, TOPIC, VALUE, HEADERS)}
        content = ctypes.c_char_p(value), ctypes.c_size_t(len(value))
        what = tags[TOPIC], ctypes.c_char_p(topic.encode()), tags[VALUE], *content, tags[HEADERS], headers, tags[END]
        assert library.rd_kafka_producev(client, *what) == 0
        assert library.rd_kafka_flush(client, int(WAIT_S * 1000)) == 0
    finally:
        library.rd_kafka_destroy(client)


@pytest.mark.kafka
@pytest.mark.parametrize("name", [b"bad\xff\xfe", b"\xed\xa0\x80"], ids=["no UTF-8", "surrogate"])
def test_a_header_whose_name_is_no_text_leaves_the_message_readable(
    kafka_settings: KafkaSettings, fresh_prefix: str, name: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "alphaloop.kafka.offsets")
    ensure_topics(kafka_settings, [fresh_prefix])
    topic = jobs_topic(fresh_prefix)
    producer = Producer(kafka_settings)
    for _ in range(NUM_BEFORE):
        producer.send(topic, key=b"k", value=b"before", headers=[("name", b"text")])
    producer.flush(WAIT_S)
    producer.close()
    consumer = Consumer(kafka_settings, group_id=fresh_prefix)
    try:
        consumer.assign_from([topic], at="earliest")
        for _ in range(NUM_BEFORE):
            assert read(consumer).headers == (("name", b"text"),)
        send_with_header(kafka_settings.bootstrap_servers, topic, b"{}", name)
        found = read(consumer)
    finally:
        consumer.close()
    assert (found.value, found.headers) == (b"{}", ())
    assert [one.action for one in caplog.records if one.name == "alphaloop.kafka.offsets"] == ["headers_unreadable"]  # type: ignore[attr-defined]


def read(consumer: Consumer) -> Record:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (record := consumer.poll(0.5)) is not None:
            return record
    raise AssertionError(f"no message within {WAIT_S} s")


def test_what_is_said_of_kcat_and_the_fallback_broker_is_so(tansu_broker: str) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        missing("kcat", "apt-get install kcat")
    version = subprocess.run([kcat, "-V"], capture_output=True, text=True, check=True, timeout=60)
    if "librdkafka 2.0.2" not in version.stdout + version.stderr:
        pytest.skip("another kcat than Debian's")
    asked = subprocess.run([kcat, "-L", "-b", tansu_broker], capture_output=True, text=True, timeout=60)
    assert asked.returncode != 0, "it works now: take the sentences back"
    assert "Read underflow" in asked.stderr
    assert "Debian's kcat cannot talk to it" in FALLBACK_NOTICE
