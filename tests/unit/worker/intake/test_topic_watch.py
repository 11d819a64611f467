"""The ids of topics are asked for after each assignment and from time to time, and no more often."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from alphaloop.errors import BrokerUnavailable
from worker.intake.polling import TopicWatch

EVERY_S = 30.0


class Reader:
    """What TopicWatch sees of an intake."""

    def __init__(self, *topics: str) -> None:
        self.topics = set(topics)
        self.assignment_number = 1
        self.told: list[Mapping[str, str]] = []

    def tell_topic_ids(self, ids: Mapping[str, str]) -> None:
        self.told.append(ids)


class Watching:
    def __init__(self) -> None:
        self.now_s, self.is_away = 0.0, False
        self.asked: list[set[str]] = []
        self.readers = Reader("jobs.code", "jobs.sql"), Reader("control")
        self.watch = TopicWatch(self.readers, self._ask, every_s=EVERY_S, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def _ask(self, topics: Collection[str]) -> Mapping[str, str]:
        self.asked.append(set(topics))
        if self.is_away:
            raise BrokerUnavailable
        return dict.fromkeys(topics, "id")

    def check(self, after_s: float = 0.0) -> int:
        self.now_s += after_s
        self.watch.check()
        return len(self.asked)


def test_every_topic_is_asked_for_once_a_period() -> None:
    one = Watching()
    assert [one.check(), one.check(EVERY_S / 2), one.check(EVERY_S / 2), one.check()] == [1, 1, 2, 2]
    assert one.asked == [{"jobs.code", "jobs.sql", "control"}] * 2
    assert all(len(reader.told) == 2 for reader in one.readers)


def test_an_assignment_is_looked_at_without_waiting() -> None:
    one = Watching()
    one.check()
    one.readers[0].assignment_number += 1
    assert [one.check(1.0), one.check(1.0)] == [2, 2]


def test_a_broker_that_is_away_is_asked_again_a_period_later() -> None:
    one = Watching()
    one.is_away = True
    assert [one.check(), one.check(1.0), one.check(EVERY_S)] == [1, 1, 2]
    assert not one.readers[0].told
