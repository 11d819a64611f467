"""What all clients share: their properties, the log lines of a lost broker, and librdkafka's errors as ours.

librdkafka writes a "Connect … failed" line every second while a broker is gone. `BrokerWatch` logs the loss once and
the return once instead. Four questions decide the class of an error, in this order: is the client dead, has the group
rebalanced, does no broker answer, was a message not stored? Everything else is a BrokerError.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import (
    BrokerError,
    BrokerLoginRefused,
    BrokerUnavailable,
    ConfigError,
    DeliveryFailed,
    FatalBrokerError,
    MessageRefused,
    MessageTooLarge,
    StaleAssignment,
    TopicUnavailable,
    package_missing,
)
from alphaloop.settings import KafkaSettings

log = logging.getLogger(__name__)

#: How much larger than its job a dead letter may be: the original value plus the `__dlq.errors.*` headers.
DEAD_LETTER_OVERHEAD_BYTES: Final = 128 << 10

#: How long any client waits for the broker's answer to one request.
REQUEST_TIMEOUT_S: Final = 10.0
_STATISTICS_INTERVAL_MS: Final = 2000
#: How soon a new task's topic is seen.
_METADATA_REFRESH_MS: Final = 5000
#: Lines of librdkafka that repeat those of BrokerWatch.
_REPEATED_FACILITIES: Final = frozenset({"FAIL", "ERROR", "BRKMAIN"})


class BrokerWatch:
    """Logs the loss of the broker once and its return once. One per client; called from the client's thread."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self.is_lost = False  #: whether no broker answers now, as far as the client knows
        self._said: set[int] = set()

    def on_error(self, error: KafkaError) -> None:
        """librdkafka's `error_cb`."""
        code = error.code()
        if code == KafkaError._ALL_BROKERS_DOWN:
            if not self.is_lost:
                self.is_lost = True
                log.warning("no broker answers at %s; trying again until one does", self._bootstrap_servers)
        elif code in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            log.debug("%s", error.str())  # one broker of several, or the line before _ALL_BROKERS_DOWN
        elif code not in self._said:
            self._said.add(code)
            log.error("broker: %s (%s)", error.str(), error.name())

    def on_statistics(self, statistics: str) -> None:
        """librdkafka's `stats_cb`: the only sign for an idle client that a broker is up again."""
        if self.is_lost and any(b["state"] == "UP" for b in json.loads(statistics)["brokers"].values()):
            self.answered()

    def answered(self) -> None:
        """Record that a broker has just answered."""
        self._said.clear()
        if self.is_lost:
            self.is_lost = False
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
        "topic.metadata.refresh.interval.ms": _METADATA_REFRESH_MS,
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
    except ImportError as error:
        raise package_missing(error, "kafka.aws_region") from None

    def sign(_: str) -> tuple[str, float]:
        try:
            token, ends_at_ms = MSKAuthTokenProvider.generate_auth_token(region)
        except Exception as error:
            # The client says only that there is no token.
            name = type(error).__name__
            log.error("AWS's signer made no token for Kafka in %s (%s): are there credentials of AWS?", region, name)
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


STALE_ASSIGNMENT: Final = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
    }
)
#: Temporary errors after a broker's start or an election, or while a topic is made anew.
PASSING: Final = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.INCONSISTENT_TOPIC_ID,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    }
)
UNREACHABLE: Final = PASSING | frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
        KafkaError._NODE_UPDATE,
        KafkaError._PARTIAL,  # a broker that has just started answers without the others
        KafkaError._UNSUPPORTED_FEATURE,  # one that is still starting may answer that it knows few requests
        KafkaError.NOT_CONTROLLER,  # topics are created while brokers come and go
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
    }
)
NOT_STORED: Final = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._INVALID_DIFFERENT_RECORD,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)
#: One message, or the batch that it was sent in, is too large.
TOO_LARGE: Final = frozenset(
    {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE}
)
#: Something about one message that another try does not change.
REFUSED: Final = frozenset(
    {
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.POLICY_VIOLATION,
        KafkaError._INVALID_ARG,
    }
)
LOGIN_REFUSED: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL})
DENIED: Final = LOGIN_REFUSED | frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})


_UNREAD_PEM: Final = re.compile(r"ssl\.(ca|certificate|key)\.location failed")


def broker_error(error: KafkaError | KafkaException, doing: str) -> BrokerError:
    """The BrokerError for `error`; its message begins with `doing`, what was being done."""
    cause = _cause(error)
    if cause is None:
        return BrokerError(f"{doing}: {error}")
    code = cause.code()
    reason = _UNREAD_PEM.sub(r"kafka.ssl_\1_location: expected a readable PEM file", cause.str())
    text = f"{doing}: {reason} ({cause.name()})"
    if cause.fatal() or code == KafkaError._FATAL:
        return FatalBrokerError(text, hint="the process must be started again; a supervisor does that")
    if code in STALE_ASSIGNMENT:
        return StaleAssignment(text)
    if code in UNREACHABLE:
        return BrokerUnavailable(text, hint="is the broker at kafka.bootstrap_servers up and reachable from here?")
    if code in NOT_STORED:
        return DeliveryFailed(text)
    return BrokerError(text, hint=_hint(code))


def login_refused(errors: Iterable[KafkaError], doing: str) -> BrokerLoginRefused | None:
    """The error for a broker that answers and refuses the login, from what a client's `error_cb` got."""
    for error in errors:
        if error.code() in LOGIN_REFUSED:
            return BrokerLoginRefused(f"{doing}: {error.str()} ({error.name()})", hint=_hint(error.code()))
    return None


def delivery_error(error: KafkaError | KafkaException, topic: str) -> BrokerError:
    """The BrokerError for what became of one message; its class says whether another try may succeed.

    MessageRefused: never. TopicUnavailable: once the topic exists and may be written to. FatalBrokerError: not with
    this client. All others: it may.
    """
    doing = f"sending to {topic}"
    mapped_error = broker_error(error, doing)
    cause = _cause(error)
    if cause is None or isinstance(mapped_error, FatalBrokerError):
        return mapped_error
    text, code = mapped_error.message, cause.code()
    if code in TOO_LARGE:
        return MessageTooLarge(text, hint=f"max.message.bytes of {topic}, or kafka.max_message_bytes, is smaller")
    if code in REFUSED:
        return MessageRefused(text)
    if code in MISSING:
        return TopicUnavailable(text, hint=f"create the topic {topic}, as `alphaloop topics create` does")
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return TopicUnavailable(text, hint=f"let this user write to {topic} (Kafka's ACLs)")
    if type(mapped_error) is BrokerError:
        return DeliveryFailed(text, hint=mapped_error.hint)
    return mapped_error


@contextlib.contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Raise what librdkafka raises as ours."""
    try:
        yield
    except KafkaException as error:
        raise broker_error(error, doing) from error


def _cause(error: KafkaError | KafkaException) -> KafkaError | None:
    if isinstance(error, KafkaError):
        return error
    return next((part for part in error.args if isinstance(part, KafkaError)), None)


def _hint(code: int) -> str | None:
    if code in DENIED:
        return "check kafka.security_protocol, the credentials and certificates, and the ACLs of this user"
    if code in MISSING:
        return "no such topic: workers create topics that are needed, if they may; so does `alphaloop topics create`"
    return None
