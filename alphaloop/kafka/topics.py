"""The topics of the contract: their creation where they are missing, their ids, their retention.

Offsets begin again in a topic that was deleted and made anew, so an offset says where to go on only together with the
topic's id (KIP-516). The id is committed beside each offset, and compared at each assignment and from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from alphaloop.errors import BrokerError, BrokerUnavailable
from alphaloop.kafka.client import (
    DEAD_LETTER_OVERHEAD_BYTES,
    MISSING,
    broker_error,
    client_config,
    login_refused,
    mapped,
)
from alphaloop.kafka.offsets import TopicPartition
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
    larger = size + DEAD_LETTER_OVERHEAD_BYTES
    found = []
    for task in tasks:
        name = jobs_topic(task)
        found += [_topic(kafka, topic, size, 7 * _DAY_MS) for topic in (name, high_topic(task))]
        # One partition, because few jobs fail; and each worker would have to read many more partitions.
        found += [
            _topic(kafka, retry_topic(task, delay_s), larger, 7 * _DAY_MS, num_partitions=1)
            for delay_s in dict.fromkeys(kafka.retry_delays_s)
        ]
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


_PREFIX: Final = "topic_id="
#: Brokers learn of a new topic one after the other. A new client that was told of the old one would find no leader.
AGREEMENT_S: Final = 5.0
#: Of a broker that has no ids.
_NONE: Final = "A" * 22


class TopicIds:
    """Asks the broker for the ids of topics, with one client for all questions. One thread uses it."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._client: AdminClient | None = None

    def ask(self, topics: Collection[str]) -> dict[str, str]:
        """The ids of these topics; without those that do not exist and those that have none. Raises BrokerError."""
        if not topics:
            return {}
        if self._client is None:
            self._client = admin_client(self._kafka)
        timeout_s = self._kafka.request_timeout_s
        with mapped("asking for the ids of topics"):
            answers = self._client.describe_topics(ck.TopicCollection(sorted(topics)), request_timeout=timeout_s)
        found = {}
        for name, answer in answers.items():
            try:
                topic_id = str(answer.result(timeout_s).topic_id)
            except KafkaException as error:
                if error.args[0].code() not in MISSING:
                    raise broker_error(error, f"asking for the id of {name}") from error
            except TimeoutError:
                raise BrokerUnavailable("asking for the ids of topics: no answer in time") from None
            else:
                if topic_id != _NONE:
                    found[name] = topic_id
        return found


class KnownTopicIds:
    """The ids under which a client reads its topics. The thread that polls owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids: dict[str, str] = {}
        self._new: dict[str, str] = {}  # of topics that were made anew under the client
        self._noticed_s = 0.0
        self._gone: set[str] = set()

    def learn(self, ids: Mapping[str, str]) -> None:
        """Note the ids of topics now. A broker that lags behind may name one that is gone: that is no news."""
        for topic, one in ids.items():
            if one not in self._gone and one not in (self._ids.setdefault(topic, one), self._new.get(topic)):
                self._new[topic], self._noticed_s = one, self._clock()

    @property
    def made_anew(self) -> frozenset[str]:
        """The topics that have another id than the one under which they are read, once every broker should know it."""
        return frozenset(self._new if self._clock() >= self._noticed_s + AGREEMENT_S else ())

    def begin_anew(self) -> None:
        """From now on the topics are read under their new ids."""
        self._gone |= {self._ids[topic] for topic in self._new}
        self._ids |= self._new
        self._new = {}

    def beside(self, topic: str) -> str:
        """What to commit beside an offset of this topic; nothing where its id is not known."""
        known = self._ids.get(topic)
        return "" if known is None else f"{_PREFIX}{known}"


def committed_ids(committed: Iterable[ck.TopicPartition]) -> dict[str, set[str]]:
    """The ids that were committed beside offsets, by topic."""
    found: dict[str, set[str]] = {}
    for one in committed:
        beside = one.metadata or ""
        if one.error is None and one.offset >= 0 and beside.startswith(_PREFIX):
            found.setdefault(one.topic, set()).add(beside.removeprefix(_PREFIX))
    return found


_JOBS_PREFIX: Final = "jobs."


def longest_job_retention(kafka: KafkaSettings) -> timedelta | None:
    """How long a message of any `jobs.` topic may still be read; None: without limit, or the broker does not say.

    Retries and dead letters are among these topics. Kafka deletes whole segments, and a segment may take messages for
    `segment.ms`, so that time counts too. Raises BrokerError, BrokerUnavailable.
    """
    names = [name for name in list_topics(kafka) if name.startswith(_JOBS_PREFIX)]
    if not names:
        return timedelta(0)
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    with mapped("asking for the retention of topics"):
        # The name keeps the client alive until every answer is in.
        admin = admin_client(kafka)
        answers = admin.describe_configs(resources, request_timeout=kafka.request_timeout_s)
        found = [_retention(answer.result(kafka.request_timeout_s)) for answer in answers.values()]
    if len(found) < len(names):
        raise BrokerUnavailable("the broker did not describe every topic")
    limited = [one for one in found if one is not None]
    return max(limited) if len(limited) == len(found) else None


def _retention(config: dict[str, Any]) -> timedelta | None:
    values = {name: config[name].value for name in ("cleanup.policy", "retention.ms", "segment.ms") if name in config}
    if len(values) < 3 or "delete" not in str(values["cleanup.policy"]) or int(values["retention.ms"]) < 0:
        return None
    return timedelta(milliseconds=int(values["retention.ms"]) + int(values["segment.ms"]))


def delete_before(kafka: KafkaSettings, offsets: Mapping[TopicPartition, int]) -> None:
    """Delete every record below these offsets: an operator's order, never a worker's.

    Raises BrokerError for the first partition that refuses.
    """
    if not offsets:
        return
    wanted = [ck.TopicPartition(*partition, offset) for partition, offset in offsets.items()]
    with mapped("deleting records"):
        admin = admin_client(kafka)
        answers = admin.delete_records(wanted, request_timeout=kafka.request_timeout_s)
    for partition, answer in answers.items():
        try:
            answer.result()
        except KafkaException as error:
            raise broker_error(error, f"deleting from {partition.topic}[{partition.partition}]") from error
