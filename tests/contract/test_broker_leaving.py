"""A member leaves its group before its client is closed: a callback inside the close may hang or abort the process."""

from __future__ import annotations

from collections.abc import Sequence

import confluent_kafka as ck
import pytest

from alphaloop.errors import AlphaloopError
from alphaloop.kafka import consumer as module
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import Member, committed, pump

pytestmark = pytest.mark.kafka


class WatchedClient(ck.Consumer):
    """Knows whether it is being closed."""

    is_closing = False

    def close(self) -> None:
        self.is_closing = True
        super().close()


class Leaving(Member):
    """Notes whether its callbacks ran inside the client's close."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self.inside: list[tuple[str, bool]] = []
        self.failure: Exception | None = None
        super().__init__(kafka, name, jobs_topic(name))

    def note(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        client = self.consumer._client
        assert isinstance(client, WatchedClient)
        self.inside.append((what, client.is_closing))
        self.next_offsets |= dict.fromkeys(partitions, 1)
        super().note(what, partitions)
        if what == "revoke" and self.failure is not None:
            raise self.failure


@pytest.fixture
def name(kafka_settings: KafkaSettings, fresh_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task with two partitions, and a group of the same name; clients are watched."""
    monkeypatch.setattr(module.ck, "Consumer", WatchedClient)
    ensure_topics(kafka_settings, [fresh_prefix])
    return fresh_prefix


def test_a_member_hands_its_partitions_over_and_commits_before_the_close(
    kafka_settings: KafkaSettings, name: str
) -> None:
    member = Leaving(kafka_settings, name)
    pump([member], lambda: len(member.owned) == 2)
    partitions = set(member.owned)
    member.consumer.close()
    assert member.inside == [("assign", False), ("revoke", False)]
    member.consumer.close()
    assert len(member.inside) == 2, "once is enough"
    assert committed(kafka_settings, name, *partitions) == [1, 1]


def test_a_member_closed_in_the_middle_of_a_rebalance_leaves_first(kafka_settings: KafkaSettings, name: str) -> None:
    first = Leaving(kafka_settings, name)
    pump([first], lambda: len(first.owned) == 2)
    second = Leaving(kafka_settings, name)
    try:
        # The first member is asked for a partition, but does not poll; the second one waits for the partition.
        pump([second], lambda: ("assign", False) in second.inside)
    finally:
        first.consumer.close()
        second.consumer.close()
    assert ("revoke", False) in first.inside
    assert {is_closing for _, is_closing in first.inside + second.inside} == {False}


def test_what_a_callback_raises_comes_out_of_close_and_the_client_is_closed(
    kafka_settings: KafkaSettings, name: str
) -> None:
    member = Leaving(kafka_settings, name)
    pump([member], lambda: len(member.owned) == 2)
    member.failure = AlphaloopError("of the application")
    with pytest.raises(AlphaloopError, match="of the application"):
        member.consumer.close()
    assert member.inside == [("assign", False), ("revoke", False)]
    with pytest.raises(RuntimeError, match="closed"):
        member.consumer.poll(0.0)
