"""TLS and SASL against a real Apache Kafka: who gets in, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr

from alphaloop.errors import BrokerLoginRefused, BrokerUnavailable
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import RESULTS, check_reachable, ensure_topics, is_reachable
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import send, with_listener
from tests.fixtures.missing import self_signed
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka

PASSWORD = "correct-horse"


@pytest.fixture(scope="module")
def secured(kafka_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """Settings for the SASL_SSL listener of a broker of this module's own."""
    folder = tmp_path_factory.mktemp("secured")
    broker, keystore = self_signed(folder, "broker"), folder / "broker.pem"
    keystore.write_text(broker.key.read_text() + broker.cert.read_text())
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    properties = {
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f'{login} user_alice="{PASSWORD}";',
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
    }
    with with_listener(kafka_home, folder / "kafka", "SASL_SSL", properties) as address:
        yield KafkaSettings(
            bootstrap_servers=address,
            security_protocol="SASL_SSL",
            sasl_mechanism="PLAIN",
            sasl_username="alice",
            sasl_password=SecretStr(PASSWORD),
            ssl_ca_location=broker.cert,
            session_timeout_ms=6000,
        )


def test_the_right_password_produces_and_consumes(secured: KafkaSettings) -> None:
    ensure_topics(secured, ["code"])
    send(secured, RESULTS, [b"over TLS"])
    consumer, seen = Consumer(secured, group_id="g"), []
    consumer.assign_from([RESULTS], at="earliest")
    until(lambda: seen.append(consumer.poll(0.2)) or seen[-1] is not None, "the message is read")
    consumer.close()
    assert (seen[-1].key, seen[-1].value) == (b"over TLS", b"over TLS")


def test_others_do_not_get_in(secured: KafkaSettings, tmp_path: Path) -> None:
    other = self_signed(tmp_path, "other").cert
    assert is_reachable(secured, 30.0)
    wrong = {"sasl_password": SecretStr("guess")}, {"ssl_ca_location": other}, {"security_protocol": "PLAINTEXT"}
    strangers = [secured.model_copy(update=fields) for fields in wrong]

    def refusal(settings: KafkaSettings) -> type[BrokerUnavailable]:
        with pytest.raises(BrokerUnavailable) as caught:
            check_reachable(settings, 3.0)
        return caught.type

    def is_told_in_the_end(settings: KafkaSettings, expected: type[BrokerUnavailable]) -> None:
        # A busy broker may not have said in time why it lets nobody in.
        until(lambda: refusal(settings) is expected, f"the refusal is {expected.__name__}")

    # A TLS listener that meets a plain client hangs up without a reason.
    told = [BrokerLoginRefused, BrokerLoginRefused, BrokerUnavailable]
    with ThreadPoolExecutor(len(strangers)) as pool:
        list(pool.map(is_told_in_the_end, strangers, told))
