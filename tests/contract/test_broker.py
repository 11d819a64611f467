"""What alphaloop needs of a broker, asked of each broker that it can start itself."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import time
from contextlib import closing
from datetime import UTC, datetime

import pytest
from confluent_kafka import cimpl

from alphaloop.embedded.stack import FALLBACK_NOTICE
from alphaloop.errors import BrokerError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS, cluster_id, ensure_topic, ensure_topics, is_reachable, list_topics
from alphaloop.messages.topics import dlq_topic, jobs_topic, retry_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import Member, pump, send
from tests.fixtures.missing import missing
from tests.fixtures.worker import WAIT_S, Sender, until

#: Where librdkafka's default partitioner, CRC-32 of the key, sends it to with two partitions.
KEY_OF_PARTITION_0 = b"k4"


def reading(kafka: KafkaSettings) -> closing[Consumer]:
    """Without a group."""
    return closing(Consumer(kafka, group_id="nobody"))


def taken(reader: Consumer, count: int) -> list[list[Record]]:
    """So many records, as they come together."""
    found: list[list[Record]] = []
    until(lambda: found.append(reader.poll_many(100, 0.5)) or sum(map(len, found)) >= count, f"{count} records come")
    assert reader.poll_many(100, 0.0) == []
    return found


@pytest.fixture
def topic(broker_settings: KafkaSettings, fresh_prefix: str) -> str:
    """A jobs topic of this test's own, with two partitions."""
    ensure_topics(broker_settings, [fresh_prefix])
    return jobs_topic(fresh_prefix)


@pytest.fixture
def is_kafka(request: pytest.FixtureRequest) -> bool:
    """Else it is Tansu 0.6.0, which counts the newest batch of a partition as one message."""
    return str(request.node.callspec.id) == "kafka"


def partitions_of(topic: str) -> set[TopicPartition]:
    return {TopicPartition(topic, 0), TopicPartition(topic, 1)}


def test_topics_are_created_once_and_only_those_that_are_there_are_read(
    broker_settings: KafkaSettings, fresh_prefix: str
) -> None:
    assert is_reachable(broker_settings, 30.0)
    assert cluster_id(broker_settings) == cluster_id(broker_settings) != ""
    name = jobs_topic(fresh_prefix)
    with reading(broker_settings) as reader, pytest.raises(BrokerError, match=name):
        reader.assign_from([name], at="earliest")
    assert name in ensure_topics(broker_settings, [fresh_prefix])
    assert ensure_topics(broker_settings, [fresh_prefix]) == []
    before = set(list_topics(broker_settings))
    assert {name, RESULTS} <= before
    kafka = broker_settings.model_copy(update={"retry_delays_s": (10, 60)})
    ensure_topic(kafka, dlq_topic(name), [fresh_prefix])
    later = {dlq_topic(name), retry_topic(fresh_prefix, 10), retry_topic(fresh_prefix, 60)}
    until(lambda: set(list_topics(broker_settings)) - before == later, "those of failures are there")


def test_keys_values_and_headers_arrive_as_sent_and_in_order(
    broker_settings: KafkaSettings, topic: str, is_kafka: bool
) -> None:
    headers = [("ce_id", b"1"), ("empty", b""), ("ce_id", b"again"), ("binary", bytes(range(256)))]
    megabyte = bytes(range(256)) * (1 << 12)
    with closing(Producer(broker_settings)) as one:
        for i in range(500):
            one.send(topic, key=KEY_OF_PARTITION_0, value=b"v%d" % i, headers=headers)
        for value in (None, megabyte, megabyte + b"!"):
            one.send(topic, key=KEY_OF_PARTITION_0, value=value)
        one.flush(30)
        assert one.num_pending == 0
        with reading(broker_settings) as reader:
            reader.assign_from([topic], at="earliest")
            together = taken(reader, 503)
            assert reader.bounds([topic])[TopicPartition(topic, 1)] == (0, 0)
            send(broker_settings, topic, [b"a", b"b", b"c"], partition=1)
            assert reader.bounds([topic])[TopicPartition(topic, 1)] == ((0, 3) if is_kafka else (0, 1))
            one.send(topic, key=None, value=b"without a key")
            one.flush(30)
            assert [
                (record.key, record.value) for records in taken(reader, 4) for record in records if not record.key
            ] == [(None, b"without a key")]
    assert 1 < max(map(len, together)) <= 100
    records = [record for records in together for record in records]
    assert [record.offset for record in records] == list(range(503))
    assert {record.key for record in records} == {KEY_OF_PARTITION_0}
    assert [record.value for record in records[:500]] == [b"v%d" % i for i in range(500)]
    assert {record.headers for record in records[:500]} == {tuple(headers)}
    assert records[500].headers == ()
    assert [record.value for record in records[500:]] == [None, megabyte, megabyte + b"!"]
    assert abs((records[0].timestamp_ms or 0) / 1000 - time.time()) < 600


def test_reading_from_the_end_or_since_a_time_misses_nothing_new(
    broker_settings: KafkaSettings, topic: str, is_kafka: bool
) -> None:
    send(broker_settings, topic, [b"old"] * 3, partition=0)
    with reading(broker_settings) as from_end, reading(broker_settings) as since:
        since.assign_from([topic], at="earliest")
        newest_ms = max(record.timestamp_ms or 0 for records in taken(since, 3) for record in records)
        from_end.assign_from([topic], at="latest")
        until(lambda: time.time() * 1000 > newest_ms + 1, "the clock that stamps messages has gone on")
        send(broker_settings, topic, [b"new"], partition=0)
        since.assign_since([topic], datetime.fromtimestamp((newest_ms + 1) / 1000, UTC))
        send(broker_settings, topic, [b"newest"], partition=1)
        for reader in (from_end, since):
            values: list[bytes] = []

            def come(reader: Consumer = reader, values: list[bytes] = values) -> bool:
                values.extend(record.value or b"" for record in reader.poll_many(100, 0.5))
                return {b"new", b"newest"} <= set(values)

            until(come, "what is new is read")
            # Tansu's end lies inside its newest batch, so a reader there must tell old from new by the key.
            if reader is from_end:
                assert sorted(values) == [b"new", b"newest", *([] if is_kafka else [b"old", b"old"])]


def test_members_of_a_group_share_topics_that_match_and_go_on_after_what_is_committed(
    broker_settings: KafkaSettings, topic: str, fresh_prefix: str
) -> None:
    pattern, both = rf"^jobs\.{fresh_prefix}[a-z0-9_-]*$", partitions_of(topic)
    # A join takes half of it at Tansu.
    kafka = broker_settings.model_copy(update={"session_timeout_ms": 3000})
    with closing(Member(kafka, fresh_prefix, pattern)) as first:
        pump([first], lambda: first.owned == both)
        send(broker_settings, topic, [b"%d" % i for i in range(100)])
        pump([first], lambda: len(first.records) == 100)
        assert first.consumer.committed(both) == dict.fromkeys(both)
        with closing(Member(kafka, fresh_prefix, pattern)) as second:
            pump([first, second], lambda: len(first.owned) == len(second.owned) == 1)
            assert first.owned | second.owned == both
            # Cooperative: only the partition that moves is taken, the other is read on without a break.
            assert [one for one in first.called if one[0] == "revoke"] == [("revoke", second.owned)]
            (moved,) = second.owned
            num_read = sum(record.topic_partition == moved for record in first.records)
            assert second.consumer.committed([moved]) == {moved: num_read}
            send(broker_settings, topic, [b"%d" % i for i in range(100, 200)])
            pump([first, second], lambda: len(first.records) + len(second.records) >= 200)
        pump([first], lambda: first.owned == both)
        send(broker_settings, topic, [b"%d" % i for i in range(200, 300)])
        pump([first], lambda: len(first.records) + len(second.records) >= 300)
        read = sorted(int(record.value or b"") for record in first.records + second.records)
        assert read == list(range(300))
        ensure_topics(broker_settings, [f"{fresh_prefix}-later"])
        ensure_topic(broker_settings, dlq_topic(topic))
        later = jobs_topic(f"{fresh_prefix}-later")
        pump([first], lambda: partitions_of(later) <= first.owned)
        send(broker_settings, later, [b"300"])
        pump([first], lambda: first.records[-1].topic == later)
        assert {tp.topic for tp in first.owned} == {topic, later}, "dead letters are not jobs"


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
def test_a_header_whose_name_is_no_text_leaves_the_message_readable(
    kafka_settings: KafkaSettings, fresh_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "alphaloop.kafka.offsets")
    ensure_topics(kafka_settings, [fresh_prefix])
    topic = jobs_topic(fresh_prefix)
    Sender(kafka_settings).send(topic, [b"before"] * NUM_BEFORE, headers=[("name", b"text")])
    with reading(kafka_settings) as consumer:
        consumer.assign_from([topic], at="earliest")
        for _ in range(NUM_BEFORE):
            assert read(consumer).headers == (("name", b"text"),)
        for name in (b"bad\xff\xfe", b"\xed\xa0\x80"):  # no UTF-8, and a surrogate
            send_with_header(kafka_settings.bootstrap_servers, topic, b"{}", name)
            found = read(consumer)
            assert (found.value, found.headers) == (b"{}", ())
    told = [one.action for one in caplog.records if one.name == "alphaloop.kafka.offsets"]  # type: ignore[attr-defined]
    assert told == ["headers_unreadable"] * 2


def read(consumer: Consumer) -> Record:
    found: list[Record | None] = []
    until(lambda: found.append(consumer.poll(0.5)) or found[-1] is not None, "a message comes")
    assert found[-1] is not None
    return found[-1]


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
