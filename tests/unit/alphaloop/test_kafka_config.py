"""Settings as librdkafka properties, and the one voice for a lost broker."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from pydantic import SecretStr

from alphaloop.errors import BrokerError, BrokerUnavailable, ConfigError
from alphaloop.kafka.client import BrokerWatch, client_config
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics, is_reachable
from alphaloop.settings import KafkaSettings

NOBODY = KafkaSettings(bootstrap_servers="127.0.0.1:9", request_timeout_s=0.3)  # the discard port: nobody listens


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
    assert "open sesame" not in repr(kafka)


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


def test_nobody_at_the_address_is_said_as_such() -> None:
    assert not is_reachable(NOBODY, 0.2)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:9"):
        ensure_topics(NOBODY, ["code"])


def test_a_full_buffer_is_waited_out_and_then_told() -> None:
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
