"""Headers that other clients may send and Python's client cannot read."""

from __future__ import annotations

import ctypes
import logging
import time

import pytest
from confluent_kafka import cimpl

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings

pytestmark = pytest.mark.kafka

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
