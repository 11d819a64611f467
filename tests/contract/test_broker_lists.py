"""Members of one group that read different topics, as workers of several targets do: offsets stay with the topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import cycle, islice

import pytest

from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import ensure_topics, topic_lister
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import Member, pump, send
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka

NUM = 40  #: messages of a topic


@pytest.fixture
def topics(kafka_settings: KafkaSettings, fresh_prefix: str) -> list[str]:
    """Four topics of jobs."""
    tasks = [f"{fresh_prefix}-{number}" for number in range(4)]
    ensure_topics(kafka_settings, tasks)
    return [jobs_topic(task) for task in tasks]


@pytest.fixture
def members(kafka_settings: KafkaSettings, fresh_prefix: str) -> Iterator[list[Member]]:
    """Two members of a group; the first reads nothing yet, as `read` says what it reads."""
    with ExitStack() as exits:
        yield [exits.enter_context(closing(Member(kafka_settings, fresh_prefix))) for _ in range(2)]


def of(owned: set[TopicPartition]) -> set[str]:
    return {one.topic for one in owned}


def values(member: Member, topic: str) -> list[bytes]:
    return [one.value or b"" for one in member.records if one.topic == topic]


def numbered(begin: int) -> list[bytes]:
    return [b"%d" % number for number in range(begin, begin + NUM)]


def until_read(members: Sequence[Member], topic: str, num: int) -> None:
    pump(members, lambda: sum(len(values(one, topic)) for one in members) >= num, f"{num} of {topic} are read")


def test_each_member_gets_the_topics_that_it_lists_and_what_nobody_lists_waits(
    kafka_settings: KafkaSettings, topics: list[str], members: list[Member]
) -> None:
    one, other = members
    first, second, third, unlisted = topics
    for topic in topics:
        send(kafka_settings, topic, numbered(0))
    one.read(first, second)
    other.read(third)
    for topic in (first, second, third):
        until_read(members, topic, NUM)
    assert (of(one.owned), of(other.owned)) == ({first, second}, {third})
    assert {record.topic for record in one.records} == {first, second}
    assert {record.topic for record in other.records} == {third}
    other.read(third, unlisted)
    until_read(members, unlisted, NUM)
    assert sorted(values(other, unlisted)) == sorted(numbered(0)), "from the beginning"


def test_a_topic_that_goes_from_one_list_to_another_goes_on_at_its_offset_and_nothing_else_moves(
    kafka_settings: KafkaSettings, topics: list[str], members: list[Member]
) -> None:
    one, other = members
    first, second, third, _ = topics
    one.read(first, second)
    other.read(third)
    pump(members, lambda: (of(one.owned), of(other.owned)) == ({first, second}, {third}), "each has its own")
    send(kafka_settings, second, numbered(0))
    until_read(members, second, NUM)
    one.called.clear()
    other.called.clear()
    one.read(first)
    send(kafka_settings, second, numbered(NUM))
    other.read(third, second)
    until_read(members, second, 2 * NUM)
    assert sorted(values(one, second)) == sorted(numbered(0))
    assert sorted(values(other, second)) == sorted(numbered(NUM)), "no message is read again and none is passed over"
    assert {(what, topic) for what, its in one.called for topic in of(its)} <= {("revoke", second), ("assign", first)}
    assert not [what for what, its in other.called if what != "assign" and third in of(its)]
    assert ("revoke", second) in {(what, topic) for what, its in one.called for topic in of(its)}


def test_a_member_may_read_nothing_for_a_while(
    kafka_settings: KafkaSettings, topics: list[str], members: list[Member]
) -> None:
    one, other = members
    first, second = topics[:2]
    one.read(first)
    other.read(second)
    pump(members, lambda: (of(one.owned), of(other.owned)) == ({first}, {second}), "each has its own")
    send(kafka_settings, first, numbered(0))
    until_read(members, first, NUM)
    one.read()
    pump(members, lambda: not one.owned, "it reads nothing")
    send(kafka_settings, first, numbered(NUM))
    one.read(first)
    until_read(members, first, 2 * NUM)
    assert sorted(values(one, first)) == sorted(numbered(0) + numbered(NUM))


def test_a_member_that_swaps_topics_is_given_the_new_ones_and_hands_over_the_old(
    topics: list[str], fresh_prefix: str, members: list[Member]
) -> None:
    """Of topics that a client does not know, librdkafka asks the broker first, and then loses what it read before."""
    one, other = members
    first, second, third, fourth = topics
    assert not one.consumer.knows([jobs_topic(fresh_prefix)]), "the broker does not have it"
    one.read(first)
    pump(members, lambda: of(one.owned) == {first}, "the leader is there")
    other.read(second)
    pump(members, lambda: of(other.owned) == {second}, "so is the other one")
    for member, before, after in ((other, second, third), (one, first, fourth)):
        member.called.clear()
        assert member.consumer.knows([after])
        member.read(after)
        pump(members, lambda member=member, after=after: of(member.owned) == {after}, "the new list holds")
        assert [what for what, its in member.called if before in of(its)] == ["revoke"]


def test_lists_that_change_while_the_group_rebalances_come_to_rest_at_the_last_ones(
    kafka_settings: KafkaSettings, topics: list[str], members: list[Member]
) -> None:
    one, other = members
    first, second, third, fourth = topics
    one.read(first)
    other.read(third)
    pump(members, lambda: one.consumer.has_joined and other.consumer.has_joined, "both are members")
    for ones, others in islice(cycle((((first,), (second, third)), ((first, second), (third,)))), 12):
        one.read(*ones)
        other.read(*others)
        for member in members:
            member.poll(0.05)
    one.read(first, fourth)
    other.read(second, third)
    rest = ({first, fourth}, {second, third})
    pump(members, lambda: (of(one.owned), of(other.owned)) == rest, "the last lists hold")
    for topic in topics:
        send(kafka_settings, topic, numbered(0))
        until_read(members, topic, NUM)
    assert {record.topic for record in one.records} == rest[0]
    assert {record.topic for record in other.records} == rest[1]


def test_one_client_lists_the_topics_again_and_again(kafka_settings: KafkaSettings, fresh_prefix: str) -> None:
    ask, topic = topic_lister(kafka_settings), jobs_topic(fresh_prefix)
    assert topic not in ask()
    ensure_topics(kafka_settings, [fresh_prefix])
    until(lambda: topic in ask(), "the broker that is asked knows it")
