"""Settings as librdkafka's properties, its errors in our tree, and brokers that are lost or not ready yet."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka import KafkaError, KafkaException
from pydantic import SecretStr

from alphaloop.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    DeliveryFailed,
    FatalBrokerError,
    MessageRefused,
    MessageTooLarge,
    StaleAssignment,
    TopicUnavailable,
)
from alphaloop.kafka.client import BrokerWatch, broker_error, client_config, delivery_error
from alphaloop.kafka.consumer import Consumer, _judge
from alphaloop.kafka.offsets import OffsetQueries, TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import is_reachable, list_topics
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import limit_requests

NOBODY = KafkaSettings(bootstrap_servers="127.0.0.1:9")  # the discard port: nobody listens


def statistics(*states: str) -> str:
    return json.dumps({"brokers": {str(i): {"state": state} for i, state in enumerate(states)}})


def test_without_an_address_the_hint_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="KAFKA_BOOTSTRAP_SERVERS"):
        client_config(KafkaSettings())


def test_secrets_are_unwrapped_and_unset_properties_left_out() -> None:
    kafka = KafkaSettings(
        bootstrap_servers="broker:9093",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="worker",
        sasl_password=SecretStr("open sesame"),
        ssl_ca_location=Path("/etc/ca.pem"),
    )
    config = client_config(kafka)
    assert config["sasl.password"] == "open sesame"
    assert config["ssl.ca.location"] == "/etc/ca.pem"
    assert "ssl.key.password" not in config


def test_the_operators_properties_win_over_everything() -> None:
    kafka = KafkaSettings(
        bootstrap_servers="b:1", extra={"linger.ms": 9, "client.rack": "r1", "security.protocol": "SSL"}
    )
    config = client_config(kafka, {"acks": "all", "linger.ms": 5})
    assert (config["acks"], config["linger.ms"], config["client.rack"]) == ("all", 9, "r1")
    assert config["security.protocol"] == "SSL"


@pytest.mark.parametrize("extra", [{"no.such.property": 1}, {"session.timeout.ms": -5}])
def test_a_property_that_librdkafka_refuses_is_an_error_of_ours(extra: dict[str, str | int | float | bool]) -> None:
    with pytest.raises(BrokerError, match=next(iter(extra))):
        Consumer(NOBODY.model_copy(update={"extra": extra}), group_id="g")


def test_a_full_buffer_is_waited_out_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_requests(monkeypatch, 0.3)
    producer = Producer(NOBODY.model_copy(update={"extra": {"queue.buffering.max.messages": 3}}))
    try:
        for _ in range(3):
            producer.send("jobs.code", key=None, value=b"x")
        with pytest.raises(BrokerError, match=r"3 messages, stayed full for 0\.3 s"):
            producer.send("jobs.code", key=None, value=b"x")
        with pytest.raises(BrokerError, match=r"3 to jobs\.code not acknowledged within 0\.1 s"):
            producer.flush(0.1)
    finally:
        producer.close()
    assert producer.num_pending == 0


def test_a_loss_and_a_return_are_each_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "alphaloop.kafka")
    watch = BrokerWatch("broker:9092")
    for _ in range(5):
        watch.on_error(KafkaError(KafkaError._TRANSPORT, "Connect failed"))
        watch.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
        watch.on_statistics(statistics("CONNECT", "DOWN"))
    assert watch.is_lost
    assert caplog.messages == ["no broker answers at broker:9092; trying again until one does"]
    watch.on_statistics(statistics("DOWN", "UP"))
    watch.on_statistics(statistics("UP", "UP"))
    watch.answered()
    assert not watch.is_lost
    assert caplog.messages[1:] == ["the broker at broker:9092 answers again"]
    watch.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert len(caplog.messages) == 3


def test_a_refused_password_is_said_once_until_something_works(caplog: pytest.LogCaptureFixture) -> None:
    watch = BrokerWatch("broker:9092")
    for _ in range(3):
        watch.on_error(KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error"))
    assert len(caplog.messages) == 1
    assert "SASL authentication error" in caplog.messages[0]


def test_the_librarys_own_repetitions_are_held_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "alphaloop.kafka")
    library = logging.getLogger("alphaloop.kafka.librdkafka")
    library.error("%s [%s] %s", "FAIL", "c#1", "Connect to broker:9092 failed")
    library.warning("%s [%s] %s", "MAXPOLL", "c#1", "Application maximum poll interval exceeded")
    assert caplog.messages == ["MAXPOLL [c#1] Application maximum poll interval exceeded"]


CODES = {
    name: code
    for name in dir(KafkaError)
    if name.lstrip("_").isupper() and isinstance(code := getattr(KafkaError, name), int)
}


def test_every_code_is_a_broker_error_that_names_itself() -> None:
    assert len(CODES) > 150
    for code in CODES.values():
        error = KafkaError(code, "as the broker puts it")
        for given in (error, KafkaException(error)):
            mapped = broker_error(given, "committing offsets")
            assert isinstance(mapped, BrokerError)
            assert mapped.message.startswith("committing offsets: as the broker puts it")
            assert error.name() in mapped.message


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ILLEGAL_GENERATION", StaleAssignment),
        ("UNKNOWN_MEMBER_ID", StaleAssignment),
        ("REBALANCE_IN_PROGRESS", StaleAssignment),
        ("_ALL_BROKERS_DOWN", BrokerUnavailable),
        ("_TIMED_OUT", BrokerUnavailable),
        ("_RESOLVE", BrokerUnavailable),
        ("_PARTIAL", BrokerUnavailable),
        ("_UNSUPPORTED_FEATURE", BrokerUnavailable),
        ("COORDINATOR_LOAD_IN_PROGRESS", BrokerUnavailable),
        ("_MSG_TIMED_OUT", DeliveryFailed),
        ("NOT_ENOUGH_REPLICAS", DeliveryFailed),
        ("_FATAL", FatalBrokerError),
        ("TOPIC_AUTHORIZATION_FAILED", BrokerError),
    ],
)
def test_what_the_caller_must_tell_apart(name: str, kind: type[BrokerError]) -> None:
    mapped = broker_error(KafkaError(CODES[name]), "sending")
    assert type(mapped) is kind


#: Kafka's protocol guide calls them retriable, and librdkafka gives them to a client that asks for offsets or polls.
_OF_AN_ELECTION = (
    *("LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "REPLICA_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"),
    *("LISTENER_NOT_FOUND", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "OFFSET_NOT_AVAILABLE"),
    *("UNSTABLE_OFFSET_COMMIT", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID"),
    *("NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"),
)


@pytest.mark.parametrize("name", _OF_AN_ELECTION)
def test_what_passes_with_an_election_is_asked_again_and_ends_no_poll(name: str) -> None:
    error = KafkaError(CODES[name], "as the broker puts it")
    assert type(broker_error(error, "polling")) is BrokerUnavailable
    assert type(delivery_error(error, "results")) is BrokerUnavailable
    _judge(error, BrokerWatch("localhost:1"))
    client: Any = _Client(num_unknown=2, code=CODES[name])
    queries = OffsetQueries(client, timeout_s=60.0)
    assert queries.bounds([_NEW]) == {_NEW: (0, 3)}
    for ask in (lambda: queries.committed([_NEW]), lambda: queries.since(_AT, {_NEW: 3})):
        client.num_unknown = 2
        assert ask() == {_NEW: 3}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MSG_SIZE_TOO_LARGE", MessageTooLarge),
        ("RECORD_LIST_TOO_LARGE", MessageTooLarge),
        ("INVALID_RECORD", MessageRefused),
        ("_INVALID_DIFFERENT_RECORD", DeliveryFailed),
        ("TOPIC_AUTHORIZATION_FAILED", TopicUnavailable),
        ("_UNKNOWN_TOPIC", TopicUnavailable),
        ("UNKNOWN_TOPIC_OR_PART", TopicUnavailable),
        ("_MSG_TIMED_OUT", DeliveryFailed),
        ("_TRANSPORT", BrokerUnavailable),
        ("OFFSET_OUT_OF_RANGE", DeliveryFailed),
    ],
)
def test_what_another_try_can_change_is_told_for_each_message(name: str, kind: type[BrokerError]) -> None:
    told = delivery_error(KafkaError(CODES[name], "as the broker puts it"), "results")
    assert type(told) is kind
    assert "sending to results: as the broker puts it" in told.message


def test_a_fatal_error_is_fatal_whatever_its_code() -> None:
    for code in (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.MSG_SIZE_TOO_LARGE):
        error = KafkaError(code, "fenced", fatal=True)
        assert type(broker_error(error, "sending")) is FatalBrokerError
        assert type(delivery_error(error, "results")) is FatalBrokerError


@pytest.mark.parametrize("name", ["_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "GROUP_AUTHORIZATION_FAILED"])
def test_a_refused_user_is_told_where_to_look(name: str) -> None:
    assert "credentials" in (broker_error(KafkaError(CODES[name]), "polling").hint or "")


def test_an_exception_without_an_error_keeps_its_text() -> None:
    mapped = broker_error(KafkaException("something odd"), "polling")
    assert type(mapped) is BrokerError
    assert mapped.message == "polling: something odd"


_NEW = TopicPartition("jobs.new", 0)
_AT = datetime(2026, 9, 1, tzinfo=UTC)


class _Client:
    """Answers for its partitions behind `num_unknown` refusals: the first of the whole request, others of each one."""

    def __init__(self, num_unknown: int, code: int = KafkaError.UNKNOWN_TOPIC_OR_PART) -> None:
        self.num_unknown = num_unknown
        self._error = KafkaError(code)

    def offsets_for_times(self, asked: list[ck.TopicPartition], timeout: float) -> list[SimpleNamespace]:
        offset = {ck.OFFSET_BEGINNING: 0}
        return self._answers({TopicPartition(one.topic, one.partition): offset.get(one.offset, 3) for one in asked})

    def committed(self, asked: list[ck.TopicPartition], timeout: float) -> list[SimpleNamespace]:
        return self._answers({TopicPartition(one.topic, one.partition): 3 for one in asked})

    def _answers(self, offsets: dict[TopicPartition, int]) -> list[SimpleNamespace]:
        left, self.num_unknown = self.num_unknown, max(0, self.num_unknown - 1)
        if left > 1:
            raise KafkaException(self._error)
        error = self._error if left else None
        return [
            SimpleNamespace(topic=at.topic, partition=at.partition, offset=n, error=error) for at, n in offsets.items()
        ]

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART) if self.num_unknown else None
        self.num_unknown = max(0, self.num_unknown - 1)
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions=dict.fromkeys(range(2)))})


def test_a_topic_that_was_just_made_is_asked_for_again() -> None:
    client: Any = _Client(num_unknown=2)
    assert OffsetQueries(client, timeout_s=60.0).bounds([_NEW]) == {_NEW: (0, 3)}
    client.num_unknown = 2
    assert OffsetQueries(client, timeout_s=60.0).partitions(["jobs.new"]) == [_NEW, TopicPartition("jobs.new", 1)]


def test_a_topic_that_stays_unknown_is_an_error_that_names_it() -> None:
    client: Any = _Client(num_unknown=1_000_000)
    with pytest.raises(BrokerError, match=r"jobs\.new\[0\]"):
        OffsetQueries(client, timeout_s=0.01).bounds([_NEW])
    with pytest.raises(BrokerError, match=r"reading jobs\.new: "):
        OffsetQueries(client, timeout_s=0.01).partitions(["jobs.new"])


def knows_few_requests(request: bytes) -> bytes:
    """The answer to an ApiVersionsRequest 3 (18): no error, and no other request is known (Kafka's protocol guide)."""
    correlation_id, no_error, no_tags = request[8:12], b"\0\0", b"\0"
    one_range = b"\2" + struct.pack(">hhh", 18, 0, 3) + no_tags
    body = correlation_id + no_error + one_range + struct.pack(">i", 0) + no_tags
    return struct.pack(">i", len(body)) + body


@pytest.fixture
def starting_broker() -> Iterator[KafkaSettings]:
    """The settings of a broker that knows no request but the one that asks what it knows."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    client, _ = server.accept()
                    held.append(client)
                    client.sendall(knows_few_requests(client.recv(4096)))

        held: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield KafkaSettings(bootstrap_servers=f"127.0.0.1:{server.getsockname()[1]}")
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for client in held:
            client.close()


def test_a_broker_that_knows_few_requests_yet_is_not_reachable(starting_broker: KafkaSettings) -> None:
    assert not is_reachable(starting_broker, 30)
    with pytest.raises(BrokerUnavailable, match="_UNSUPPORTED_FEATURE"):
        list_topics(starting_broker)
