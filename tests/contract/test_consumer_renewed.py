"""A consumer of whose topics one was made anew goes on with another client, in the same group."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import confluent_kafka as ck
import pytest

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka import consumer as module
from alphaloop.kafka import topics
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import Member, limit_requests, pump, send
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka


class SlowClient(ck.Consumer):
    """Commits and closes only when it may."""

    may_commit, may_close = threading.Event(), threading.Event()
    num_closed = 0

    def commit(self, *given: Any, **named: Any) -> Any:
        self.may_commit.wait()
        return super().commit(*given, **named)

    def close(self) -> None:
        self.may_close.wait()
        super().close()
        type(self).num_closed += 1


class Renewed(Member):
    """A member of a group that reads two topics. What is revoked it commits at 1."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self._kafka = kafka
        self.gone, self.other = jobs_topic(f"{name}a"), jobs_topic(f"{name}b")
        ensure_topics(kafka, [f"{name}a", f"{name}b"])
        super().__init__(kafka, name, self.gone, self.other)

    def note(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        self.next_offsets = dict.fromkeys(partitions, 1)
        super().note(what, partitions)

    def topics_called(self) -> list[tuple[str, set[str]]]:
        return [(what, {one.topic for one in partitions}) for what, partitions in self.called]

    def send(self, value: bytes) -> None:
        """A message to each partition of both topics."""
        for topic in (self.gone, self.other):
            for partition in (0, 1):
                send(self._kafka, topic, [value], partition)

    def read_until(self, count: int) -> None:
        """Poll until so many messages have come."""
        pump([self], lambda: len(self.records) == count, f"{count} messages")

    def change(self) -> None:
        """Let one topic have another id."""
        self.consumer.note_ids({self.gone: "another"})
        self.consumer.renew_if_made_anew()


@pytest.fixture
def member(
    request: pytest.FixtureRequest, kafka_settings: KafkaSettings, fresh_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Renewed]:
    """Has read a message of each partition. Its client may do everything; a test may limit its seconds to wait."""
    monkeypatch.setattr(module.ck, "Consumer", SlowClient)
    monkeypatch.setattr(topics, "AGREEMENT_S", 0.0)
    SlowClient.may_commit.set()
    SlowClient.may_close.set()
    SlowClient.num_closed = 0
    if hasattr(request, "param"):
        limit_requests(monkeypatch, request.param)
    member = Renewed(kafka_settings, fresh_prefix)
    member.send(b"first")
    member.read_until(4)
    member.called.clear()
    yield member
    SlowClient.may_commit.set()
    SlowClient.may_close.set()
    member.consumer.close()


def offsets(member: Renewed, topic: str) -> set[int | None]:
    """What the group has committed of the topic's partitions."""
    return set(member.consumer.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)]).values())


def test_partitions_of_the_topic_are_lost_and_all_others_revoked_before_the_group_is_joined_again(
    member: Renewed,
) -> None:
    SlowClient.may_close.clear()
    member.change()
    assert member.topics_called() == [("lost", {member.gone}), ("revoke", {member.other})]
    assert (offsets(member, member.gone), offsets(member, member.other)) == ({None}, {1})
    member.send(b"second")
    member.read_until(4 + 6)
    again = [one.value for one in member.records[4:] if one.topic == member.gone]
    assert sorted(again) == [b"first", b"first", b"second", b"second"]
    assert {one.value for one in member.records[4:] if one.topic == member.other} == {b"second"}
    assert SlowClient.num_closed == 0, "a client that does not close holds up nothing"
    SlowClient.may_close.set()
    until(lambda: SlowClient.num_closed == 1, "the old client is closed")
    calls = list(member.called)
    member.consumer.renew_if_made_anew()
    assert member.called == calls, "once is enough"


@pytest.mark.parametrize("member", [2.0], indirect=True, ids=["a commit is given up"])
def test_the_client_stays_while_a_commit_is_under_way(member: Renewed) -> None:
    SlowClient.may_commit.clear()
    with pytest.raises(BrokerUnavailable):
        member.consumer.commit({TopicPartition(member.other, 0): 1})
    member.change()
    assert not member.called
    SlowClient.may_commit.set()

    def is_renewed() -> bool:
        member.consumer.poll_many(1, 0.1)
        member.consumer.renew_if_made_anew()
        return bool(member.called)

    until(is_renewed, "the client is replaced")
    assert member.topics_called()[0] == ("lost", {member.gone})


def test_the_client_stays_until_every_broker_should_know_the_new_topic(
    member: Renewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is committed meanwhile counts for nobody."""
    monkeypatch.setattr(topics, "AGREEMENT_S", 3600.0)
    ids = topics.topic_ids(member._kafka, [member.gone])
    member.change()
    assert not member.called
    member.consumer.commit({TopicPartition(member.gone, number): 1 for number in (0, 1)})
    found = member.consumer._client.committed([ck.TopicPartition(member.gone, number) for number in (0, 1)], timeout=30)
    assert {one.metadata for one in found} == {f"topic_id={ids[member.gone]}"}
    monkeypatch.setattr(topics, "AGREEMENT_S", 0.0)
    member.consumer.renew_if_made_anew()
    assert member.called
