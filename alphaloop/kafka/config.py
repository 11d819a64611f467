"""Settings as librdkafka properties, and log lines for a lost broker.

librdkafka writes a "Connect … failed" line every second while a broker is gone. `BrokerWatch` logs the loss once and
the return once instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError

from alphaloop.errors import ConfigError
from alphaloop.settings import KafkaSettings

log = logging.getLogger(__name__)

#: How much larger than its job a dead letter may be: the original value plus the `__dlq.errors.*` headers.
DEAD_LETTER_OVERHEAD_BYTES: Final = 128 << 10

_STATISTICS_INTERVAL_MS: Final = 2000
#: Lines of librdkafka that repeat those of BrokerWatch.
_REPEATED_FACILITIES: Final = frozenset({"FAIL", "ERROR", "BRKMAIN"})


class BrokerWatch:
    """Logs the loss of the broker once and its return once. One per client; called from the client's thread."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._is_lost = False
        self._said: set[int] = set()

    @property
    def is_lost(self) -> bool:
        """Whether no broker answers now, as far as the client knows."""
        return self._is_lost

    def on_error(self, error: KafkaError) -> None:
        """librdkafka's `error_cb`."""
        code = error.code()
        if code == KafkaError._ALL_BROKERS_DOWN:
            if not self._is_lost:
                self._is_lost = True
                log.warning("no broker answers at %s; trying again until one does", self._bootstrap_servers)
        elif code in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            log.debug("%s", error.str())  # one broker of several, or the line before _ALL_BROKERS_DOWN
        elif code not in self._said:
            self._said.add(code)
            log.error("broker: %s (%s)", error.str(), error.name())

    def on_statistics(self, statistics: str) -> None:
        """librdkafka's `stats_cb`: the only sign for an idle client that a broker is up again."""
        if self._is_lost and any(b["state"] == "UP" for b in json.loads(statistics)["brokers"].values()):
            self.answered()

    def answered(self) -> None:
        """Record that a broker has just answered."""
        self._said.clear()
        if self._is_lost:
            self._is_lost = False
            log.warning("the broker at %s answers again", self._bootstrap_servers)


class _Repetition(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        facility = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return facility not in _REPEATED_FACILITIES or log.isEnabledFor(logging.DEBUG)


_library_log = logging.getLogger("alphaloop.kafka.librdkafka")
_library_log.addFilter(_Repetition())


def client_config(
    kafka: KafkaSettings, own: Mapping[str, Any] | None = None, *, watch: BrokerWatch | None = None
) -> dict[str, Any]:
    """The properties that all clients share, overridden by the client's `own`, and those by `kafka.extra`.

    Raises ConfigError without a broker. The result holds secrets: never log it.
    """
    servers = bootstrap_servers(kafka)
    watch = watch or BrokerWatch(servers)
    config: dict[str, Any] = {
        "bootstrap.servers": servers,
        "security.protocol": kafka.security_protocol,
        "socket.keepalive.enable": True,
        "statistics.interval.ms": _STATISTICS_INTERVAL_MS,
        "message.max.bytes": kafka.max_message_bytes + DEAD_LETTER_OVERHEAD_BYTES,
        "topic.metadata.refresh.interval.ms": kafka.metadata_refresh_ms,
        "logger": _library_log,
        "error_cb": watch.on_error,
        "stats_cb": watch.on_statistics,
    }
    optional = {
        "sasl.mechanism": kafka.sasl_mechanism,
        "sasl.username": kafka.sasl_username,
        "sasl.password": kafka.sasl_password and kafka.sasl_password.get_secret_value(),
        "ssl.ca.location": kafka.ssl_ca_location and str(kafka.ssl_ca_location),
        "ssl.certificate.location": kafka.ssl_certificate_location and str(kafka.ssl_certificate_location),
        "ssl.key.location": kafka.ssl_key_location and str(kafka.ssl_key_location),
        "ssl.key.password": kafka.ssl_key_password and kafka.ssl_key_password.get_secret_value(),
    }
    if kafka.oauth_token_url:
        optional |= {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": kafka.oauth_token_url,
            "sasl.oauthbearer.client.id": kafka.oauth_client_id,
            "sasl.oauthbearer.client.secret": kafka.oauth_client_secret
            and kafka.oauth_client_secret.get_secret_value(),
            "sasl.oauthbearer.scope": kafka.oauth_scope,
            "sasl.oauthbearer.extensions": kafka.oauth_extensions,
        }
    config |= {key: value for key, value in optional.items() if value is not None}
    if kafka.aws_region:
        config["oauth_cb"] = _tokens_of_aws(kafka.aws_region)
    return config | dict(own or {}) | kafka.extra


def _tokens_of_aws(region: str) -> Callable[[str], tuple[str, float]]:
    """librdkafka's `oauth_cb`: a token signed with the credentials that AWS's own tools find, and the time of its end.

    Raises ConfigError without the signer's package. The callback's exceptions are the reason of a refused login.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    except ImportError:
        raise ConfigError(
            "kafka.aws_region: expected the package aws-msk-iam-sasl-signer-python, found none",
            hint="pip install 'alphaloop[msk]'",
        ) from None

    def sign(_: str) -> tuple[str, float]:
        try:
            token, ends_at_ms = MSKAuthTokenProvider.generate_auth_token(region)
        except Exception as error:
            # The client says only that there is no token.
            found = type(error).__name__
            log.error("AWS's signer made no token for Kafka in %s (%s): are there credentials of AWS?", region, found)
            raise
        return token, ends_at_ms / 1000

    return sign


def bootstrap_servers(kafka: KafkaSettings) -> str:
    """The broker's address. Raises ConfigError if no setting names it."""
    if not kafka.bootstrap_servers:
        raise ConfigError(
            "kafka.bootstrap_servers: expected HOST:PORT, found nothing",
            hint="set KAFKA_BOOTSTRAP_SERVERS, or start the embedded broker with `alphaloop up`",
        )
    return kafka.bootstrap_servers
