"""When a chunk with text is settled: acknowledged or dropped, once, and not before."""

from __future__ import annotations

import pytest

from alphaloop.engine import TokenDelta
from alphaloop.errors import BrokerError, DeliveryFailed, FatalBrokerError, MessageTooLarge, TopicUnavailable
from tests.fixtures.publishing import FakeProducer, InstantEvent
from worker import sending
from worker.background import Retry
from worker.sending import ChunkSender, DeliveryReport, JobStream, KafkaMessage


class Streaming:
    """A sender of chunks; `reports` are what becomes of the next messages, one after the other."""

    def __init__(self, *reports: DeliveryReport, is_told_at_once: bool = False) -> None:
        self.reports, self.is_told_at_once = list(reports), is_told_at_once
        self.dropped: list[str] = []
        self.client = FakeProducer(lambda _: self._report())
        hurry = InstantEvent()
        self.sender = ChunkSender(self.client, count_dropped=self.dropped.append, retry=Retry(hurry))
        self.stream = JobStream("j1", 1, {})

    def _report(self) -> DeliveryReport:
        report = self.reports.pop(0) if self.reports else None
        if report is not None and self.is_told_at_once:
            raise report
        return report

    def chunk(self) -> KafkaMessage:
        return self.stream.add(TokenDelta("j", "word ", 0), created=0, model="target")


def test_a_chunk_is_settled_by_its_acknowledgement_and_not_by_being_sent() -> None:
    one = Streaming()
    one.sender.send([one.chunk(), one.chunk()])
    assert (one.stream.num_settled, one.sender.has_under_way) == (0, True)
    one.client.poll(0.0)
    assert (one.stream.is_settled, one.stream.num_settled, one.sender.has_under_way) == (True, 2, False)
    assert one.stream.num_unacknowledged == 0


@pytest.mark.parametrize("error", [TopicUnavailable("no topic"), MessageTooLarge("large")])
@pytest.mark.parametrize("is_told_at_once", [True, False])
def test_a_chunk_that_is_dropped_is_settled_and_counted(error: BrokerError, is_told_at_once: bool) -> None:
    one = Streaming(error, is_told_at_once=is_told_at_once)
    one.sender.send([one.chunk()])
    one.client.poll(0.0)
    assert (one.stream.is_settled, one.sender.has_under_way, one.dropped) == (True, False, [error.code])
    assert one.stream.num_unacknowledged == 1, "readers never see it"


@pytest.mark.parametrize("is_told_at_once", [True, False])
def test_a_chunk_that_an_outage_kept_back_is_settled_once_it_was_sent_again(is_told_at_once: bool) -> None:
    one = Streaming(DeliveryFailed("late"), is_told_at_once=is_told_at_once)
    one.sender.send([one.chunk()])
    one.client.poll(0.0)
    assert (one.stream.is_settled, one.sender.has_under_way) == (False, False)
    one.sender.send([])
    assert (one.stream.is_settled, one.sender.has_under_way) == (False, True)
    one.client.poll(0.0)
    assert (one.stream.num_settled, one.sender.has_under_way) == (1, False)
    assert one.stream.num_unacknowledged == 0


@pytest.mark.parametrize("then", [None, MessageTooLarge("large")])
def test_a_chunk_that_is_sent_again_with_the_end_of_a_stream_is_settled_once(then: DeliveryReport) -> None:
    one = Streaming(DeliveryFailed("late"), DeliveryFailed("late"), None, then)
    kept = one.chunk()
    one.sender.send([kept])
    one.client.poll(0.0)
    final = KafkaMessage("tokens", b"j2", b"end")
    one.sender.end([final])
    assert [message.value for message in one.client.sent] == [kept.value, kept.value, b"end", kept.value]
    assert (one.stream.num_settled, one.sender.has_under_way) == (1, False)
    assert one.stream.num_unacknowledged == (then is not None)


def test_a_chunk_for_which_there_is_no_room_is_dropped_and_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOST_KEPT", 1)
    one = Streaming(DeliveryFailed("late"), DeliveryFailed("late"))
    one.sender.send([one.chunk(), one.chunk()])
    one.client.poll(0.0)
    assert (one.stream.num_settled, one.dropped) == (1, [DeliveryFailed.code])


def test_a_dead_producer_settles_nothing() -> None:
    one = Streaming(FatalBrokerError("fenced"))
    one.sender.send([one.chunk()])
    one.client.poll(0.0)
    assert not one.stream.is_settled
