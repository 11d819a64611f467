"""Topics are deleted and made anew, and other brokers lead them: who wrote to them and read them before goes on.

librdkafka believes a leader only where its epoch grows, and a topic made anew begins with epoch 0 (#4898).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from alphaloop.errors import BrokerError, TopicUnavailable
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, RESULTS, topic_ids
from alphaloop.messages.topics import JOBS_PATTERN
from alphaloop.settings import KafkaSettings
from tests.chaos.brokers import Brokers
from tests.fixtures.broker import committed, intake_of, send, settings_for
from tests.fixtures.worker import WAIT_S, until
from worker.background import Retry
from worker.intake.control import ControlReader
from worker.intake.polling import TopicWatch

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

CODE, SQL, GONE = "jobs.code", "jobs.sql", "gone"
#: Where librdkafka's default partitioner, CRC-32 of the key, sends them to: partitions 0 and 1 of two.
KEY_OF_EACH_PARTITION = (b"k4", b"k0")


class Cluster:
    """Three brokers. Every topic has two partitions, led by node 2 after the election, in which node 1 goes."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        # No member is put out of its group while the group's own leader is elected.
        patient = {"extra": {"topic.metadata.refresh.interval.ms": 60_000}, "session_timeout_ms": 20_000}
        self.kafka = settings_for(brokers.addresses).model_copy(update=patient)

    def _admin(self) -> AdminClient:
        """A new one each time: one that knows node 1 as controller waits for it, and connects to it without a pause."""
        return AdminClient({"bootstrap.servers": self._brokers.addresses})

    def make(self, topic: str, replicas: Sequence[Sequence[int]] = ((1, 2), (1, 2))) -> None:
        """A topic with its partitions on these nodes, led by the first of each."""
        new = NewTopic(
            topic,
            num_partitions=len(replicas),
            replica_assignment=[list(nodes) for nodes in replicas],
            config={"min.insync.replicas": "1"},
        )
        admin = self._admin()
        admin.create_topics([new])[topic].result(WAIT_S)

    def delete(self, topic: str) -> None:
        """Return when it is gone."""
        admin = self._admin()
        admin.delete_topics([topic])[topic].result(WAIT_S)
        until(lambda: topic not in admin.list_topics(timeout=WAIT_S).topics, f"{topic} is gone")

    def make_again(self, topic: str) -> None:
        """A topic that is gone, now led by node 3."""
        self.make(topic, ((3,), (3,)))

    def send(self, topic: str, *values: bytes) -> None:
        """Each value to each partition; return when they are stored."""
        for partition in (0, 1):
            send(self.kafka, topic, values, partition)

    def committed(self, group_id: str, topic: str) -> list[int | None]:
        """What the group has committed of each partition."""
        return committed(self.kafka, group_id, TopicPartition(topic, 0), TopicPartition(topic, 1))


class Reader:
    """An intake that is told when a topic was made anew, as a worker's is. What it takes is finished at once."""

    def __init__(self, kafka: KafkaSettings, group_id: str, pattern: str) -> None:
        self.group_id = group_id
        self.read: list[tuple[str, int, bytes | None]] = []
        self.intake = intake_of(kafka, pattern, group_id)
        self.watch = TopicWatch([self.intake], partial(topic_ids, kafka), every_s=0.5)

    def take(self) -> None:
        """Read what has come."""
        self.watch.check()
        for one in self.intake.take(100, 0.1):
            self.read.append((one.record.topic, one.record.offset, one.record.value))
            self.intake.finish([one])

    def has_read(self, topic: str, *values: bytes) -> bool:
        """Whether each of these has come from each partition of the topic."""
        self.take()
        found = [value for name, _, value in self.read if name == topic]
        return all(found.count(value) >= 2 for value in values)

    def hold(self, topic: str) -> None:
        """Ask no broker for messages of the topic, so that nothing is noticed of what happens to it."""
        self.intake.hold(topic)
        until(lambda: all(self.intake.is_paused(TopicPartition(topic, number)) for number in (0, 1)), "it is paused")


class World:
    """Clients that have known the topics since before the election."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        #: Its messages time out soon.
        self.producer = Producer(cluster.kafka.model_copy(update={"extra": {"delivery.timeout.ms": 3000}}))
        self.jobs = Reader(cluster.kafka, "workers", JOBS_PATTERN)
        self.control = Reader(cluster.kafka, "workers-control", CONTROL)
        #: Asks for topics so often that it notices each deletion.
        self.watchful = Reader(
            cluster.kafka.model_copy(update={"extra": {"topic.metadata.refresh.interval.ms": 500}}), "watchful", GONE
        )
        self.readers = (self.jobs, self.control, self.watchful)
        self.ids_in_the_election: dict[str, str] = {}

    def know(self, value: bytes) -> None:
        """Return when every client reaches the leader of every partition."""
        until(self.has_stored, "results are taken")
        for reader, topics in ((self.jobs, (CODE, SQL)), (self.control, (CONTROL,)), (self.watchful, (GONE,))):
            for topic in topics:
                self.cluster.send(topic, value)
                until(lambda: reader.has_read(topic, value), f"{topic} is read")  # noqa: B023

    def has_stored(self) -> bool:
        """Whether both partitions of `results` take a message."""
        outcomes: list[BrokerError | None] = []
        try:
            for key in KEY_OF_EACH_PARTITION:
                self.producer.send(RESULTS, key=key, value=b"1", on_delivery=outcomes.append)
        except TopicUnavailable:
            return False
        self.producer.flush(WAIT_S)
        return outcomes == [None, None]

    def close(self) -> None:
        """End every client."""
        self.producer.close()
        for reader in self.readers:
            reader.intake.close(WAIT_S)


@pytest.fixture(scope="module")
def world(kafka_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """After an election of all leaders, which every client has followed."""
    brokers = Brokers(kafka_home, tmp_path_factory.mktemp("brokers"), 3)
    try:
        brokers.start()
        cluster = Cluster(brokers)
        for topic in (RESULTS, CODE, SQL, GONE, CONTROL):
            cluster.make(topic)
        world = World(cluster)
        try:
            for reader in world.readers:
                reader.intake.start()
            world.know(b"before")
            brokers.kill([0])
            world.ids_in_the_election = topic_ids(cluster.kafka, (RESULTS, CODE, SQL, GONE, CONTROL))
            world.know(b"after the election")
            yield world
        finally:
            world.close()
    finally:
        brokers.kill()


def test_ids_of_topics_are_told_while_the_cluster_may_still_name_a_dead_controller(world: World) -> None:
    assert set(world.ids_in_the_election) == {RESULTS, CODE, SQL, GONE, CONTROL}


def test_a_producer_finds_the_new_leader_of_a_topic_made_anew(world: World) -> None:
    world.cluster.delete(RESULTS)
    world.cluster.make_again(RESULTS)
    until(world.has_stored, "the new leaders take messages")


def test_a_worker_reads_jobs_of_a_topic_made_anew_from_its_new_leaders(world: World) -> None:
    cluster, reader = world.cluster, world.jobs
    cluster.send(SQL, b"before the change")
    until(lambda: reader.has_read(SQL, b"before the change"), "the other topic is read")
    reader.hold(CODE)
    cluster.delete(CODE)
    cluster.make_again(CODE)
    cluster.send(CODE, b"new 0", b"new 1")
    cluster.send(SQL, b"meanwhile")
    reader.intake.release(CODE)
    until(lambda: reader.has_read(CODE, b"new 0", b"new 1"), "the new topic is read from its beginning")
    until(lambda: reader.has_read(SQL, b"meanwhile"), "the other topic is read on")
    until(lambda: cluster.committed(reader.group_id, CODE) == [2, 2], "the new topic's offsets are committed")
    until(lambda: cluster.committed(reader.group_id, SQL) == [4, 4], "the other topic's offsets are committed")
    assert [value for _, _, value in reader.read].count(b"before the change") == 2, "what was committed comes no more"
    cluster.send(CODE, b"new 2")
    until(lambda: reader.has_read(CODE, b"new 2"), "the new topic is read on")


def test_a_topic_whose_absence_was_noticed_is_read_when_it_is_back(world: World) -> None:
    cluster, reader = world.cluster, world.watchful
    cluster.delete(GONE)
    until(lambda: reader.take() or not reader.intake.is_assigned, "the reader knows that the topic is gone")
    cluster.make_again(GONE)
    cluster.send(GONE, b"new")
    until(lambda: reader.has_read(GONE, b"new"), "the new topic is read from its beginning")


def test_cancellations_are_read_from_a_control_topic_made_anew(world: World) -> None:
    cancelled: list[str] = []

    class Jobs:
        def request_cancel(self, job_id: str, *, until: object) -> None:
            cancelled.append(job_id)

    reader = world.control
    control_reader = ControlReader(
        reader.intake, Jobs(), check_here=lambda: None, refuse=lambda *_: None, retry=Retry(threading.Event())
    )
    reader.hold(CONTROL)
    world.cluster.delete(CONTROL)
    world.cluster.make_again(CONTROL)
    world.cluster.send(CONTROL, b'{"action": "cancel", "job_id": "order-1"}')
    reader.intake.release(CONTROL)

    def is_cancelled() -> bool:
        reader.watch.check()
        control_reader.turn()
        return len(cancelled) >= 2

    until(is_cancelled, "both partitions of the new control topic are read")
    assert set(cancelled) == {"order-1"}
