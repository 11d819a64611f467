"""Questions about offsets that a broker cannot answer yet. A real one is so for milliseconds only, by chance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import BrokerError
from alphaloop.kafka.offsets import OffsetQueries, TopicPartition

_NEW = TopicPartition("jobs.new", 0)


class _Client:
    """Answers for its partitions behind `num_unknown` refusals."""

    def __init__(self, num_unknown: int) -> None:
        self.num_unknown = num_unknown

    def offsets_for_times(self, asked: list[ck.TopicPartition], timeout: float) -> list[ck.TopicPartition]:
        if self.num_unknown:
            self.num_unknown -= 1
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        offset = {ck.OFFSET_BEGINNING: 0, ck.OFFSET_END: 3}
        return [ck.TopicPartition(one.topic, one.partition, offset[one.offset]) for one in asked]

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART) if self.num_unknown else None
        self.num_unknown = max(0, self.num_unknown - 1)
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions=dict.fromkeys(range(2)))})


def test_a_topic_that_was_just_made_is_asked_for_again() -> None:
    client: Any = _Client(num_unknown=2)
    assert OffsetQueries(client, timeout_s=60.0).bounds([_NEW]) == {_NEW: (0, 3)}
    client.num_unknown = 2
    assert OffsetQueries(client, timeout_s=60.0).partitions(["jobs.new"]) == [_NEW, TopicPartition("jobs.new", 1)]


def test_a_topic_that_stays_unknown_is_an_error_that_names_it() -> None:
    client: Any = _Client(num_unknown=1_000_000)
    with pytest.raises(BrokerError, match=r"jobs\.new\[0\]"):
        OffsetQueries(client, timeout_s=0.01).bounds([_NEW])
    with pytest.raises(BrokerError, match=r"reading jobs\.new: "):
        OffsetQueries(client, timeout_s=0.01).partitions(["jobs.new"])
