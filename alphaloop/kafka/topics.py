"""The topics of the contract: their creation on first use, what the broker has of them, their ids, their retention.

Before anything happens there is one topic a task, and the four that all tasks share. A task's retry and dead-letter
topics come at its first failure, all in one request, because the workers' group rebalances for each new topic it reads.

Names are ours everywhere, without `kafka.prefix`; a `Topic` and an error have those of the cluster.

Offsets begin again in a topic that was deleted and made anew, so an offset says where to go on only together with the
topic's id (KIP-516). The id is committed beside each offset, and compared at each assignment and from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    DENIED,
    MISSING,
    REQUEST_TIMEOUT_S,
    broker_error,
    client_config,
    login_refused,
    mapped,
)
from alphaloop.kafka.offsets import TopicPartition, theirs
from alphaloop.messages.topics import dlq_topic, high_topic, jobs_topic, retry_delay_s, retry_topic, task_of_failures
from alphaloop.settings import KafkaSettings

RESULTS: Final = "results"
TOKENS: Final = "tokens"
CONTROL: Final = "control"
DRIFT_REPORTS: Final = "drift-reports"
SHARED: Final = (RESULTS, TOKENS, CONTROL, DRIFT_REPORTS)  #: by all tasks

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_WEEK_MS: Final = 7 * _DAY_MS
_RETENTION_MS: Final = {TOKENS: _HOUR_MS, CONTROL: _DAY_MS, DRIFT_REPORTS: 30 * _DAY_MS}
_JOBS_PREFIX: Final = "jobs."
_LISTED_WITHIN_S: Final = 3.0
_MOST_NAMED: Final = 10  #: refused topics that an error names


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is to be, or as it is; None is what the broker does not say."""

    name: str  #: the cluster's
    num_partitions: int
    replication_factor: int
    retention_ms: int | None
    max_message_bytes: int | None


def first_topics(tasks: Iterable[str], *, high: Iterable[str] = ()) -> list[str]:
    """The topics that are needed before anything happens; the tasks `high` have a topic for jobs that go first."""
    return [*map(jobs_topic, tasks), *map(high_topic, high), *SHARED]


def failure_topics(kafka: KafkaSettings, task: str) -> list[str]:
    """The topics that a task needs from its first failure on."""
    return [
        *(retry_topic(task, delay_s) for delay_s in dict.fromkeys(kafka.retry_delays_s)),
        dlq_topic(jobs_topic(task)),
    ]


def ensure_topics(kafka: KafkaSettings, tasks: Iterable[str], *, high: Iterable[str] = ()) -> list[str]:
    """Create those of the `first_topics` that are missing, and return their names; existing ones are left as they are.

    Several processes may do this at once. Raises BrokerError, which names them, when topics are refused, those that can
    be created are created first; BrokerUnavailable without a broker.
    """
    return create_topics(kafka, missing_topics(kafka, first_topics(tasks, high=high)))


def ensure_topic(kafka: KafkaSettings, topic: str, tasks: Container[str] = ()) -> None:
    """Create a topic that alphaloop is about to write to, if it is missing.

    With a retry or dead-letter topic of one of `tasks` come all others that the task's failures need, in one request.
    Raises the errors of ensure_topics.
    """
    task = task_of_failures(topic)
    together = [] if task is None or task not in tasks else failure_topics(kafka, task)
    create_topics(kafka, missing_topics(kafka, [topic, *together]))


def missing_topics(kafka: KafkaSettings, names: Iterable[str]) -> list[Topic]:
    """Those of these topics that the broker lacks, as they are to be. Raises BrokerUnavailable."""
    existing = set(list_topics(kafka))
    return [_wanted(kafka, name) for name in dict.fromkeys(names) if name not in existing]


def create_topics(kafka: KafkaSettings, topics: Sequence[Topic]) -> list[str]:
    """Create these topics in one request, and return the names of those that no other client created meanwhile.

    Raises the errors of ensure_topics.
    """
    if not topics:
        return []
    with mapped("creating topics"):
        # The name keeps the client alive until every answer is in.
        admin = admin_client(kafka)
        answers = admin.create_topics(list(map(_new, topics)), request_timeout=REQUEST_TIMEOUT_S)
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


def existing_topics(kafka: KafkaSettings) -> list[Topic]:
    """The topics of jobs and those that all tasks share, as the broker has them, sorted. Raises BrokerError."""
    metadata = _metadata(kafka, REQUEST_TIMEOUT_S)
    shared = (*SHARED, dlq_topic(CONTROL))
    names = [name for name in _of_prefix(kafka, metadata) if name.startswith(_JOBS_PREFIX) or name in shared]
    topics = []
    for name, config in zip(map(kafka.named, names), _configs(kafka, names, strict=False), strict=True):
        partitions = metadata.topics[name].partitions.values()
        copies = min((len(partition.replicas) for partition in partitions), default=0)
        numbers = (int(config[key].value) if key in config else None for key in ("retention.ms", "max.message.bytes"))
        topics.append(Topic(name, len(partitions), copies, *numbers))
    return topics


def list_topics(kafka: KafkaSettings) -> list[str]:
    """Every topic of this prefix that the broker has, internal ones included, sorted. Raises BrokerUnavailable."""
    return _of_prefix(kafka, _metadata(kafka, REQUEST_TIMEOUT_S))


def _of_prefix(kafka: KafkaSettings, metadata: ClusterMetadata) -> list[str]:
    return sorted(name.removeprefix(kafka.prefix) for name in metadata.topics if name.startswith(kafka.prefix))


def topic_lister(kafka: KafkaSettings) -> Callable[[], list[str]]:
    """Like `list_topics`, to be called every few seconds by one thread: all calls share a client, and wait less."""
    # Statistics and errors would wait for a poll, in a queue without bounds; other clients log a lost broker.
    client = AdminClient(client_config(kafka, {"statistics.interval.ms": 0, "error_cb": lambda error: None}))

    def ask() -> list[str]:
        client.poll(0)
        with mapped("asking for the topics"):
            return _of_prefix(kafka, client.list_topics(timeout=_LISTED_WITHIN_S))

    return ask


def cluster_id(kafka: KafkaSettings) -> str:
    """The cluster's id, part of the job_id of jobs that came without one. Raises BrokerUnavailable."""
    metadata: Any = _metadata(kafka, REQUEST_TIMEOUT_S)  # the stub knows only the initial None
    if not metadata.cluster_id:
        raise BrokerError("expected the broker to name its cluster, found no cluster id")
    return str(metadata.cluster_id)


#: The client.id of a worker in its group begins with it and goes on with the id of the worker's database.
WORKER_CLIENT: Final = "alphaloop-worker-"


def other_databases(kafka: KafkaSettings, database_id: str) -> list[str]:
    """The ids of the other databases whose workers are in the workers' group. Raises BrokerError."""
    group = kafka.named(kafka.group_id)
    with mapped(f"asking for the members of {group}"):
        admin = admin_client(kafka)
        answers = admin.describe_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S)
        clients = {member.client_id for member in answers[group].result().members}
    return sorted(
        {name.removeprefix(WORKER_CLIENT) for name in clients if name.startswith(WORKER_CLIENT)} - {database_id}
    )


def is_reachable(kafka: KafkaSettings, timeout_s: float) -> bool:
    """Whether a broker answers within `timeout_s`."""
    try:
        check_reachable(kafka, timeout_s)
    except BrokerUnavailable:
        return False
    return True


def check_reachable(kafka: KafkaSettings, timeout_s: float) -> None:
    """Raises BrokerUnavailable unless a broker answers within `timeout_s`; BrokerLoginRefused without a login."""
    if not _metadata(kafka, timeout_s).brokers:
        raise BrokerUnavailable(f"{kafka.bootstrap_servers} answers, but names no broker yet")


def _wanted(kafka: KafkaSettings, name: str) -> Topic:
    """The topic as it is created. A retry topic has one partition, because few jobs fail and workers read them all."""
    is_retry, is_dlq = retry_delay_s(name) is not None, name.endswith(dlq_topic(""))
    return Topic(
        kafka.named(name),
        num_partitions=1 if is_retry else kafka.num_partitions,
        replication_factor=kafka.replication_factor,
        retention_ms=2 * _WEEK_MS if is_dlq else _RETENTION_MS.get(name, _WEEK_MS),
        max_message_bytes=kafka.max_message_bytes + (DEAD_LETTER_OVERHEAD_BYTES if is_retry or is_dlq else 0),
    )


def properties(topic: Topic) -> dict[str, str]:
    """What is set of a topic that is created, by Kafka's names."""
    return {"max.message.bytes": str(topic.max_message_bytes), "retention.ms": str(topic.retention_ms)}


def _new(topic: Topic) -> NewTopic:
    return NewTopic(
        topic.name,
        num_partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
        config=properties(topic),
    )


def _metadata(kafka: KafkaSettings, timeout_s: float) -> ClusterMetadata:
    """Raises BrokerLoginRefused, BrokerUnavailable."""
    errors: list[KafkaError] = []
    doing = f"asking {kafka.bootstrap_servers} for its topics"
    with mapped(doing):
        admin = AdminClient(client_config(kafka, {"error_cb": errors.append}))
    try:
        with mapped(doing):
            return admin.list_topics(timeout=timeout_s)
    except BrokerUnavailable:
        # The exception says only that no answer came in time; the callback gets why the broker hung up.
        admin.poll(0)
        if (refused := login_refused(errors, doing)) is not None:
            raise refused from None
        raise


def admin_client(kafka: KafkaSettings) -> AdminClient:
    with mapped("starting an admin client"):
        return AdminClient(client_config(kafka))


_PREFIX: Final = "topic_id="
#: Brokers learn of a new topic one after the other. A new client that got the old one would find no leader.
AGREEMENT_S: Final = 5.0
#: The id that brokers without ids report.
_NONE: Final = "A" * 22
#: One try to ask for ids; each further one waits twice as long.
_FIRST_TRY_S: Final = 2.0


def topic_ids(kafka: KafkaSettings, topics: Collection[str]) -> dict[str, str]:
    """The ids of these topics; without those that do not exist and those that have none. Raises BrokerError.

    Only the broker that the cluster names as controller is asked. While the cluster still names one that died,
    librdkafka connects to it thousands of times a second and takes a whole processor until the request times out. So
    the tries are short, and each has a new client, which mostly gets another controller.
    """
    if not topics:
        return {}
    end_s, try_s = time.monotonic() + REQUEST_TIMEOUT_S, min(_FIRST_TRY_S, REQUEST_TIMEOUT_S)
    while True:
        try:
            return _ask_topic_ids(kafka, topics, try_s)
        except BrokerUnavailable:
            left_s = end_s - time.monotonic()
            if left_s < _FIRST_TRY_S:
                raise
            try_s = min(2 * try_s, left_s)


def _ask_topic_ids(kafka: KafkaSettings, topics: Collection[str], timeout_s: float) -> dict[str, str]:
    client = admin_client(kafka)
    names = sorted(map(kafka.named, topics))
    with mapped("asking for the ids of topics"):
        answers = client.describe_topics(ck.TopicCollection(names), request_timeout=timeout_s)
    ids = {}
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
                ids[name.removeprefix(kafka.prefix)] = topic_id
    return ids


class KnownTopicIds:
    """The ids under which a client reads its topics. The thread that polls owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids: dict[str, str] = {}
        self._new: dict[str, str] = {}  # of topics that were made anew under the client
        self._noticed_s = 0.0
        self._gone: set[str] = set()

    def learn(self, ids: Mapping[str, str]) -> None:
        """Note the ids of topics now. A broker that lags may name one that is gone: that is no news."""
        for topic, now in ids.items():
            if now not in self._gone and now not in (self._ids.setdefault(topic, now), self._new.get(topic)):
                self._new[topic], self._noticed_s = now, self._clock()

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
    ids: dict[str, set[str]] = {}
    for partition in committed:
        beside = partition.metadata or ""
        if partition.error is None and partition.offset >= 0 and beside.startswith(_PREFIX):
            ids.setdefault(partition.topic, set()).add(beside.removeprefix(_PREFIX))
    return ids


def longest_job_retention(kafka: KafkaSettings) -> timedelta | None:
    """How long a message of any `jobs.` topic may still be read; None: without limit, or the broker does not say.

    Retries and dead letters are among these topics. Kafka deletes whole segments, and a segment may take messages for
    `segment.ms`, so that time counts too. Raises BrokerError, BrokerUnavailable.
    """
    names = [name for name in list_topics(kafka) if name.startswith(_JOBS_PREFIX)]
    if not names:
        return timedelta(0)
    limits = [_retention(config) for config in _configs(kafka, names)]
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def _configs(kafka: KafkaSettings, topics: Sequence[str], *, strict: bool = True) -> list[dict[str, Any]]:
    """The properties of these topics. Without `strict`, a topic that this user may not ask about has none."""
    resources = [ConfigResource(ResourceType.TOPIC, kafka.named(name)) for name in topics]
    if not resources:
        return []
    configs: list[dict[str, Any]] = []
    with mapped("asking for the properties of topics"):
        # The name keeps the client alive until every answer is in.
        admin = admin_client(kafka)
        answers = admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
        if len(answers) < len(topics):
            raise BrokerUnavailable("the broker did not describe every topic")
        for resource in resources:
            try:
                configs.append(answers[resource].result(REQUEST_TIMEOUT_S))
            except KafkaException as error:
                if strict or error.args[0].code() not in DENIED:
                    raise
                configs.append({})
    return configs


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
    wanted = [theirs(partition, kafka.prefix, offset) for partition, offset in offsets.items()]
    with mapped("deleting records"):
        admin = admin_client(kafka)
        answers = admin.delete_records(wanted, request_timeout=REQUEST_TIMEOUT_S)
    for partition, answer in answers.items():
        try:
            answer.result()
        except KafkaException as error:
            raise broker_error(error, f"deleting from {partition.topic}[{partition.partition}]") from error
