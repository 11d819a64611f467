"""TLS, passwords and tokens against a real Apache Kafka: who gets in, and who does not.

Tokens are those of an identity provider, and those that AWS's signer makes.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from pydantic import SecretStr, ValidationError

from alphaloop.errors import BrokerLoginRefused, BrokerUnavailable
from alphaloop.kafka.client import client_config
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import RESULTS, check_reachable, ensure_topics, is_reachable
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import send, with_listener
from tests.fixtures.missing import self_signed
from tests.fixtures.worker import until

PASSWORD, SECRET = "correct-horse", "open sesame"


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class Provider:
    """An identity provider on a port of this machine: its keys, and signed tokens for one client with its secret."""

    def __init__(self, folder: Path) -> None:
        self._key = folder / "key.pem"
        subprocess.run(["openssl", "genrsa", "-out", self._key, "2048"], check=True, capture_output=True)
        modulus = subprocess.run(
            ["openssl", "rsa", "-in", self._key, "-noout", "-modulus"], check=True, capture_output=True, text=True
        ).stdout
        number = bytes.fromhex(modulus.strip().removeprefix("Modulus="))
        self.keys = {
            "keys": [
                {"kty": "RSA", "kid": "k", "alg": "RS256", "use": "sig", "n": encoded(number), "e": encoded(b"\1\0\1")}
            ]
        }
        self.asked: list[dict[str, list[str]]] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, provider.keys)

            def do_POST(self) -> None:
                asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                provider.asked.append(asked)
                credentials = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
                if credentials != f"alphaloop:{SECRET}":
                    return self._answer(401, {"error": "invalid_client"})
                self._answer(200, {"access_token": provider.token(), "token_type": "Bearer", "expires_in": 600})

            def _answer(self, status: int, document: Any) -> None:
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def token(self) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "sub": "alphaloop", "aud": "kafka", "iat": now, "exp": now + 600, "scope": "kafka"}
        head = encoded(json.dumps({"alg": "RS256", "kid": "k", "typ": "JWT"}).encode())
        signed = f"{head}.{encoded(json.dumps(claims).encode())}"
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self._key], input=signed.encode(), check=True, capture_output=True
        ).stdout
        return f"{signed}.{encoded(signature)}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    made = Provider(tmp_path_factory.mktemp("provider"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def listener(
    kafka_home: Path, provider: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Settings of a SASL_SSL listener that knows one password, and checks the provider's tokens with its keys."""
    folder = tmp_path_factory.mktemp("secured")
    broker, keystore = self_signed(folder, "broker"), folder / "broker.pem"
    keystore.write_text(broker.key.read_text() + broker.cert.read_text())
    package, name = "org.apache.kafka.common.security", "listener.name.sasl_ssl"
    properties = {
        "sasl.enabled.mechanisms": "PLAIN,OAUTHBEARER",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        f"{name}.plain.sasl.jaas.config": f'{package}.plain.PlainLoginModule required user_alice="{PASSWORD}";',
        "sasl.oauthbearer.jwks.endpoint.url": f"{provider.url}/keys",
        "sasl.oauthbearer.expected.audience": "kafka",
        "sasl.oauthbearer.expected.issuer": provider.url,
        f"{name}.oauthbearer.sasl.jaas.config": f"{package}.oauthbearer.OAuthBearerLoginModule required;",
    }
    handler = f"{package}.oauthbearer.OAuthBearerValidatorCallbackHandler"
    properties[f"{name}.oauthbearer.sasl.server.callback.handler.class"] = handler
    with pytest.MonkeyPatch.context() as patch:
        allowed = "-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls"
        patch.setenv("JAVA_TOOL_OPTIONS", f"{allowed}={provider.url}/keys")
        with with_listener(kafka_home, folder / "kafka", "SASL_SSL", properties) as (_, address):
            yield {
                "bootstrap_servers": address,
                "security_protocol": "SASL_SSL",
                "ssl_ca_location": broker.cert,
                "session_timeout_ms": 6000,
            }


@pytest.fixture
def secured(listener: dict[str, Any]) -> KafkaSettings:
    login = {"sasl_mechanism": "PLAIN", "sasl_username": "alice", "sasl_password": SecretStr(PASSWORD)}
    return KafkaSettings(**listener, **login)


@pytest.fixture
def guarded(listener: dict[str, Any], provider: Provider) -> KafkaSettings:
    return KafkaSettings(
        **listener,
        sasl_mechanism="OAUTHBEARER",
        oauth_token_url=f"{provider.url}/token",
        oauth_client_id="alphaloop",
        oauth_client_secret=SecretStr(SECRET),
        extra={"sasl.oauthbearer.scope": "kafka jobs"},
    )


def travels(kafka: KafkaSettings, value: bytes) -> None:
    """A message to `results` and back."""
    ensure_topics(kafka, ["code"])
    send(kafka, RESULTS, [value])
    consumer, seen = Consumer(kafka, group_id="g"), set[bytes | None]()
    consumer.assign_from([RESULTS], at="earliest")
    until(lambda: seen.update(one.value for one in consumer.poll_many(10, 0.2)) or value in seen, "the message is read")
    consumer.close()


@pytest.mark.kafka
def test_the_right_password_produces_and_consumes(secured: KafkaSettings) -> None:
    travels(secured, b"over TLS")


@pytest.mark.kafka
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


@pytest.mark.kafka
def test_a_client_with_the_secret_produces_and_consumes(guarded: KafkaSettings, provider: Provider) -> None:
    travels(guarded, b"with a token")
    assert provider.asked[0] == {"grant_type": ["client_credentials"], "scope": ["kafka jobs"]}


@pytest.mark.kafka
def test_another_secret_and_a_token_of_another_signer_do_not_get_in(guarded: KafkaSettings, tmp_path: Path) -> None:
    with pytest.raises(BrokerLoginRefused, match="invalid_client"):
        check_reachable(guarded.model_copy(update={"oauth_client_secret": SecretStr("guess")}), 3.0)
    other = Provider(tmp_path)
    try:
        with pytest.raises(BrokerLoginRefused, match="invalid_token"):
            check_reachable(guarded.model_copy(update={"oauth_token_url": f"{other.url}/token"}), 5.0)
        assert other.asked
    finally:
        other.close()


@pytest.mark.kafka
def test_a_token_of_aws_signer_reaches_the_broker(
    guarded: KafkaSettings, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No broker here takes what AWS signs, so the signer gives the provider's token; all else is as with MSK.
    signed: list[str] = []

    def sign(region: str) -> tuple[str, float]:
        signed.append(region)
        return provider.token(), (time.time() + 600) * 1000

    monkeypatch.setattr("aws_msk_iam_sasl_signer.MSKAuthTokenProvider.generate_auth_token", sign)
    login: dict[str, Any] = dict.fromkeys(("oauth_token_url", "oauth_client_id", "oauth_client_secret"))
    of_aws = KafkaSettings.model_validate({**guarded.model_dump(), **login, "extra": {}, "aws_region": "eu-west-1"})
    assert of_aws.oauth_token_url is None, "no client here could ask the provider"
    travels(of_aws, b"signed")
    assert set(signed) == {"eu-west-1"}
    assert len(signed) >= 3, "by the admin client, the producer and the consumer"


def test_the_signer_of_aws_makes_the_token_from_the_credentials_that_it_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = KafkaSettings(
        bootstrap_servers="b:9098", security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", aws_region="eu-west-1"
    )
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    sign = client_config(kafka)["oauth_cb"]
    with pytest.raises(AttributeError):  # so the signer says that it has found none
        sign("")
    assert "AWS's signer made no token for Kafka in eu-west-1" in caplog.text
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    token, ends_at = sign("")
    url = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    assert re.match(r"https://kafka\.eu-west-1\.amazonaws\.com/\?Action=kafka-cluster%3AConnect&.*AKIDEXAMPLE", url)
    assert 0 < ends_at - time.time() <= 900


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "kafka.oauth_token_url or kafka.aws_region with OAUTHBEARER"),
        ({"oauth_token_url": "https://x"}, "oauth_token_url, oauth_client_id and oauth_client_secret"),
        ({"aws_region": "eu-west-1", "oauth_client_id": "x"}, "no kafka.oauth_… beside kafka.aws_region"),
        ({"sasl_mechanism": "PLAIN", "aws_region": "eu-west-1"}, "kafka.sasl_mechanism OAUTHBEARER"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=f"Expected {re.escape(expected)}"):
        KafkaSettings.model_validate({"sasl_mechanism": "OAUTHBEARER", **fields})
    extra = {"sasl.oauthbearer.method": "default", "enable.sasl.oauthbearer.unsecure.jwt": True}
    assert KafkaSettings(sasl_mechanism="OAUTHBEARER", extra=extra), "librdkafka's other ways"
