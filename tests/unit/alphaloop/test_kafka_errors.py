"""Every error code that librdkafka knows ends in our tree, and the four questions are answered right."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import (
    BrokerError,
    BrokerUnavailable,
    DeliveryFailed,
    FatalBrokerError,
    MessageRefused,
    MessageTooLarge,
    StaleAssignment,
    TopicUnavailable,
)
from alphaloop.kafka.client import broker_error, delivery_error

CODES = {
    name: code
    for name in dir(KafkaError)
    if name.lstrip("_").isupper() and isinstance(code := getattr(KafkaError, name), int)
}


def test_the_client_names_its_codes() -> None:
    assert len(CODES) > 150
    assert {"_TRANSPORT", "UNKNOWN_TOPIC_OR_PART", "_FATAL", "REBALANCE_IN_PROGRESS"} <= set(CODES)


@pytest.mark.parametrize("name", sorted(CODES))
def test_every_code_is_a_broker_error_that_names_itself(name: str) -> None:
    error = KafkaError(CODES[name], "as the broker puts it")
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
    assert mapped.is_stale_assignment == (kind is StaleAssignment)


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
