"""The topics of the contract, and their creation where they are missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.cimpl import NewTopic

from alphaloop.errors import BrokerError, BrokerUnavailable
from alphaloop.kafka.config import DEAD_LETTER_OVERHEAD_BYTES, client_config
from alphaloop.kafka.errors import broker_error, login_refused, mapped
from alphaloop.messages.topics import dlq_topic, high_topic, jobs_topic, retry_topic
from alphaloop.settings import KafkaSettings

RESULTS: Final = "results"
TOKENS: Final = "tokens"
CONTROL: Final = "control"
DRIFT_REPORTS: Final = "drift-reports"

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_MOST_NAMED: Final = 10  #: refused topics that an error names


def ensure_topics(kafka: KafkaSettings, tasks: Iterable[str]) -> list[str]:
    """Create the topics that are missing, and return their names; existing ones are left as they are.

    Several processes may do this at once. Raises BrokerError, which names them, when topics are refused, those that can
    be created are created first; BrokerUnavailable without a broker.
    """
    return _create_missing(kafka, _contract_topics(kafka, tasks))


def ensure_topic(kafka: KafkaSettings, topic: str) -> None:
    """Create one topic that alphaloop writes to, if it is missing; also a dead-letter topic that no task names.

    Raises the errors of ensure_topics.
    """
    suffix = dlq_topic("")
    if topic.endswith(suffix):
        wanted = [_dead_letter_topic(kafka, topic.removesuffix(suffix))]
    else:
        tasks = topic.split(".")[1:2] if topic.startswith("jobs.") else []
        wanted = [one for one in _contract_topics(kafka, tasks) if one.topic == topic]
    _create_missing(kafka, wanted)


def list_topics(kafka: KafkaSettings) -> list[str]:
    """Every topic the broker has, internal ones included, sorted. Raises BrokerUnavailable."""
    return sorted(_metadata(kafka, kafka.request_timeout_s).topics)


def cluster_id(kafka: KafkaSettings) -> str:
    """The cluster's id, part of the job_id of jobs that came without one. Raises BrokerUnavailable."""
    metadata: Any = _metadata(kafka, kafka.request_timeout_s)  # the stub knows only the initial None
    if not metadata.cluster_id:
        raise BrokerError("expected the broker to name its cluster, found no cluster id")
    return str(metadata.cluster_id)


def is_reachable(kafka: KafkaSettings, timeout_s: float) -> bool:
    """Whether a broker answers within `timeout_s`."""
    try:
        check_reachable(kafka, timeout_s)
    except BrokerUnavailable:
        return False
    return True


def check_reachable(kafka: KafkaSettings, timeout_s: float) -> None:
    """Raises BrokerUnavailable unless a broker answers within `timeout_s`; BrokerLoginRefused if it lets nobody in."""
    if not _metadata(kafka, timeout_s).brokers:
        raise BrokerUnavailable(f"{kafka.bootstrap_servers} answers, but names no broker yet")


def _create_missing(kafka: KafkaSettings, topics: Iterable[NewTopic]) -> list[str]:
    existing = set(list_topics(kafka))
    wanted = [topic for topic in topics if topic.topic not in existing]
    if not wanted:
        return []
    with mapped("creating topics"):
        # The name keeps the client alive until every answer is in.
        admin = admin_client(kafka)
        answers = admin.create_topics(wanted, request_timeout=kafka.request_timeout_s)
    created = []
    refused: dict[str, KafkaException] = {}
    for name, answer in answers.items():
        try:
            answer.result()
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                refused[name] = error
    if refused:
        first = next(iter(refused.values()))
        names = sorted(refused)
        others = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise broker_error(first, f"creating {', '.join(names[:_MOST_NAMED])}{others}") from first
    return created


def _contract_topics(kafka: KafkaSettings, tasks: Iterable[str]) -> list[NewTopic]:
    size = kafka.max_message_bytes
    found = []
    for task in tasks:
        name = jobs_topic(task)
        found += [_topic(kafka, topic, size, 7 * _DAY_MS) for topic in (name, high_topic(task))]
        found += [_retry_topic(kafka, retry_topic(task, delay_s)) for delay_s in dict.fromkeys(kafka.retry_delays_s)]
        found.append(_dead_letter_topic(kafka, name))
    found.append(_topic(kafka, RESULTS, size, 7 * _DAY_MS))
    found.append(_topic(kafka, TOKENS, size, _HOUR_MS))
    found.append(_topic(kafka, CONTROL, size, _DAY_MS))
    found.append(_dead_letter_topic(kafka, CONTROL))
    found.append(_topic(kafka, DRIFT_REPORTS, size, 30 * _DAY_MS))
    return found


def _dead_letter_topic(kafka: KafkaSettings, topic: str) -> NewTopic:
    size = kafka.max_message_bytes + DEAD_LETTER_OVERHEAD_BYTES
    return _topic(kafka, dlq_topic(topic), size, 14 * _DAY_MS)


def _retry_topic(kafka: KafkaSettings, name: str) -> NewTopic:
    size = kafka.max_message_bytes + DEAD_LETTER_OVERHEAD_BYTES
    # One partition, because few jobs fail; and each worker would have to read many more partitions.
    return _topic(kafka, name, size, 7 * _DAY_MS, num_partitions=1)


def _topic(
    kafka: KafkaSettings, name: str, max_message_bytes: int, retention_ms: int, *, num_partitions: int | None = None
) -> NewTopic:
    return NewTopic(
        name,
        num_partitions=num_partitions or kafka.num_partitions,
        replication_factor=kafka.replication_factor,
        config={"max.message.bytes": str(max_message_bytes), "retention.ms": str(retention_ms)},
    )


def _metadata(kafka: KafkaSettings, timeout_s: float) -> ClusterMetadata:
    """Raises BrokerLoginRefused, BrokerUnavailable."""
    told: list[KafkaError] = []
    doing = f"asking {kafka.bootstrap_servers} for its topics"
    with mapped(doing):
        admin = AdminClient(client_config(kafka, {"error_cb": told.append}))
    try:
        with mapped(doing):
            return admin.list_topics(timeout=timeout_s)
    except BrokerUnavailable:
        # The answer tells only that none came in time; why the broker hung up is told to the callback.
        admin.poll(0)
        if (refused := login_refused(told, doing)) is not None:
            raise refused from None
        raise


def admin_client(kafka: KafkaSettings) -> AdminClient:
    with mapped("starting an admin client"):
        return AdminClient(client_config(kafka))
