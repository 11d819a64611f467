"""A member leaves its group before its client is closed: a callback inside the close may hang or abort the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import confluent_kafka as ck
import pytest

from alphaloop.errors import AlphaloopError
from alphaloop.kafka import consumer as module
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings

pytestmark = pytest.mark.kafka


class WatchedClient(ck.Consumer):
    """Knows whether it is being closed."""

    is_closing = False

    def close(self) -> None:
        self.is_closing = True
        super().close()


class Member:
    """A member of a group that notes whether its callbacks ran inside the client's close."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self.consumer = Consumer(kafka, group_id=name)
        self.called: list[tuple[str, bool]] = []
        self.committed: list[TopicPartition] = []
        self.failure: Exception | None = None
        self.consumer.subscribe(
            [jobs_topic(name)], on_assign=self._note("assign"), on_revoke=self._revoked, on_lost=self._note("lost")
        )

    def _note(self, what: str) -> Callable[[Sequence[TopicPartition]], None]:
        def note(_: Sequence[TopicPartition]) -> None:
            client = self.consumer._client
            assert isinstance(client, WatchedClient)
            self.called.append((what, client.is_closing))

        return note

    def _revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("revoke")(partitions)
        self.consumer.commit(dict.fromkeys(partitions, 1))
        self.committed += partitions
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def name(kafka_settings: KafkaSettings, fresh_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task with two partitions, and a group of the same name; clients are watched."""
    monkeypatch.setattr(module.ck, "Consumer", WatchedClient)
    ensure_topics(kafka_settings, [fresh_prefix])
    return fresh_prefix


def poll(member: Member, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        member.consumer.poll(0.1)
        assert time.monotonic() < deadline


def test_a_member_hands_its_partitions_over_and_commits_before_the_close(
    kafka_settings: KafkaSettings, name: str
) -> None:
    member = Member(kafka_settings, name)
    poll(member, lambda: len(member.consumer.assignment()) == 2)
    member.consumer.close()
    assert member.called == [("assign", False), ("revoke", False)]
    assert len(member.committed) == 2
    member.consumer.close()
    assert len(member.called) == 2, "once is enough"


def test_a_member_closed_in_the_middle_of_a_rebalance_leaves_first(kafka_settings: KafkaSettings, name: str) -> None:
    first = Member(kafka_settings, name)
    poll(first, lambda: len(first.consumer.assignment()) == 2)
    second = Member(kafka_settings, name)
    try:
        # The first member is asked for a partition, but does not poll; the second one waits for the partition.
        poll(second, lambda: ("assign", False) in second.called)
    finally:
        first.consumer.close()
        second.consumer.close()
    assert ("revoke", False) in first.called
    assert {is_closing for _, is_closing in first.called + second.called} == {False}


def test_what_a_callback_raises_comes_out_of_close_and_the_client_is_closed(
    kafka_settings: KafkaSettings, name: str
) -> None:
    member = Member(kafka_settings, name)
    poll(member, lambda: len(member.consumer.assignment()) == 2)
    member.failure = AlphaloopError("of the application")
    with pytest.raises(AlphaloopError, match="of the application"):
        member.consumer.close()
    assert member.called == [("assign", False), ("revoke", False)]
    with pytest.raises(RuntimeError, match="closed"):
        member.consumer.poll(0.0)
