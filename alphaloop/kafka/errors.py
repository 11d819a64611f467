"""librdkafka's errors as ours.

Four questions decide the class, in this order: is the client dead, has the group rebalanced, does no broker answer, was
a message not stored? Everything else is a BrokerError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import (
    BrokerError,
    BrokerLoginRefused,
    BrokerUnavailable,
    DeliveryFailed,
    FatalBrokerError,
    MessageRefused,
    MessageTooLarge,
    StaleAssignment,
    TopicUnavailable,
)

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
UNREACHABLE: Final = frozenset(
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
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
    }
)
#: Temporary errors after a broker's start or an election.
PASSING: Final = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
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


def broker_error(error: KafkaError | KafkaException, doing: str) -> BrokerError:
    """The BrokerError for `error`; its message begins with `doing`, what was being done."""
    cause = _cause(error)
    if cause is None:
        return BrokerError(f"{doing}: {error}")
    code = cause.code()
    text = f"{doing}: {cause.str()} ({cause.name()})"
    if cause.fatal() or code == KafkaError._FATAL:
        return FatalBrokerError(text, hint="the process must be started again; a supervisor does that")
    if code in STALE_ASSIGNMENT:
        return StaleAssignment(text)
    if code in UNREACHABLE:
        return BrokerUnavailable(text, hint="is the broker at kafka.bootstrap_servers up and reachable from here?")
    if code in NOT_STORED:
        return DeliveryFailed(text)
    return BrokerError(text, hint=_hint(code))


def login_refused(told: Iterable[KafkaError], doing: str) -> BrokerLoginRefused | None:
    """The error for a broker that answers and refuses the login, from what a client's `error_cb` was told."""
    for error in told:
        if error.code() in LOGIN_REFUSED:
            return BrokerLoginRefused(f"{doing}: {error.str()} ({error.name()})", hint=_hint(error.code()))
    return None


def delivery_error(error: KafkaError | KafkaException, topic: str) -> BrokerError:
    """The BrokerError for what became of one message; tells what sending it again can change.

    MessageRefused: nothing. TopicUnavailable: nothing until somebody mends the topic or its access rights. Every other
    one but FatalBrokerError: the next try may succeed.
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
        return TopicUnavailable(text, hint=f"create the topic {topic}, or let this user create topics")
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
        return "no such topic: workers create their topics when they start, if this user may create topics"
    return None
