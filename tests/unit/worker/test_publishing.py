"""Results and chunks of streams on their way to Kafka's acknowledgement."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from alphaloop.engine import TokenDelta
from alphaloop.errors import (
    BrokerError,
    DeliveryFailed,
    FatalBrokerError,
    MessageRefused,
    MessageTooLarge,
    StoreUnavailable,
    TopicUnavailable,
)
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import Failure, Result, Status, StreamReader, read_chunk
from tests.fixtures.answers import CHAT
from tests.fixtures.publishing import FakeProducer, InstantEvent, Publishing, delivery
from tests.fixtures.runs import outcome
from tests.fixtures.worker import until
from worker import sending
from worker.background import Retry
from worker.dead_letters import failed_job
from worker.publishing import RecordedGroup, answer_again
from worker.sending import ChunkSender, DeliveryReport, JobStream, KafkaMessage


def test_a_result_is_cleared_only_after_its_acknowledgement_and_finished_last() -> None:
    one = Publishing()
    assert one.publish(one.recorded(1, 2)) == 1
    assert one.world.events == [
        "sent results result-1",
        "sent results result-2",
        "acknowledged",
        "cleared [1, 2]",
        "finished 1",
        "finished 2",
    ]
    assert one.queue.num_unsettled == 1, "what is in hand counts until the next turn"
    assert one.publisher.turn(0.0) == 0
    assert one.queue.num_unsettled == 0


FAILED = outcome("j1", status=Status.FAILED, error=Failure(code="decode_failed", message="no luck")).result


def test_a_failed_job_is_finished_by_the_thread_that_publishes_its_dead_letter() -> None:
    """Also when the outcome was recorded by a worker that died before it could publish the letter."""
    one = Publishing()
    failed = failed_job(delivery("j1", offset=1), FAILED, one.intake)  # type: ignore[arg-type]
    recorded = one.recorded(1, 2)
    one.publish(replace(recorded, failed=(replace(failed, delivery=recorded.deliveries[0]),)))
    assert one.world.events[-4:] == ["acknowledged", "cleared [1, 2]", "finished 2", "letter of j1"]
    one.publish(one.again(1, FAILED))
    assert one.world.events[-2:] == ["acknowledged", "letter of j1"]
    assert {dead.reason.code for dead in one.dead} == {"decode_failed"}


@pytest.mark.parametrize("failing", ["j1", "j2"])
def test_only_what_was_not_acknowledged_is_sent_again(failing: str) -> None:
    one = Publishing()
    one.world.reports[failing] = [DeliveryFailed("timed out"), DeliveryFailed("timed out"), None]
    one.publish(one.recorded(1), one.recorded(2))
    number = failing[1]
    assert sorted(one.sent()) == sorted(["result-1", "result-2", f"result-{number}", f"result-{number}"])
    assert one.world.events[-3:] == ["cleared [1, 2]", "finished 1", "finished 2"]
    assert not any(event.startswith(("cleared", "finished")) for event in one.world.events[:-3])


def test_a_full_buffer_is_tried_again() -> None:
    one = Publishing()
    one.world.send_errors = [DeliveryFailed("the send buffer stayed full")]
    one.publish(one.recorded(1), one.recorded(2))
    assert one.sent() == ["result-1", "result-2"]
    assert one.world.events[-3:] == ["cleared [1, 2]", "finished 1", "finished 2"]


def test_an_outbox_that_cannot_be_cleared_keeps_deliveries_unfinished_and_sends_nothing_twice() -> None:
    one = Publishing()
    one.world.delete_errors = [StoreUnavailable(), StoreUnavailable()]
    one.publish(one.recorded(1))
    assert one.world.events == ["sent results result-1", "acknowledged", "cleared [1]", "finished 1"]


@pytest.mark.parametrize(("error", "is_hurried"), [(DeliveryFailed("late"), True), (FatalBrokerError("fenced"), False)])
def test_in_a_hurry_or_where_the_producer_is_dead_what_is_not_acknowledged_stays_in_the_outbox(
    error: BrokerError, is_hurried: bool
) -> None:
    one = Publishing()
    if is_hurried:
        one.hurry.set()
    one.world.reports["j1"] = [error]
    with pytest.raises(type(error)):
        one.publish(one.recorded(1))
    assert one.world.events == ["sent results result-1", "not acknowledged"]


def test_outcomes_that_lost_their_claims_publish_nothing_and_finish_their_deliveries() -> None:
    one = Publishing()
    one.publish(RecordedGroup((), (delivery("j7", offset=7),), one.intake))  # type: ignore[arg-type]
    assert one.world.events == ["finished 7"]


def test_a_replacement_that_is_refused_too_is_set_aside() -> None:
    one = Publishing()
    one.world.reports[RESULTS] = [MessageRefused("invalid")] * 2 + [None]
    one.publish(one.whole(1))
    assert [event for event in one.world.events if event.startswith(("replaced", "set aside"))] == [
        "replaced j1",
        "set aside j1: invalid",
    ]
    assert one.world.events[-2:] == ["cleared [7]", "letter of j1"]
    assert one.value("alphaloop_results_refused_total", code="result_refused", done="set_aside") == 1.0


def test_a_replaced_result_has_no_choices() -> None:
    """They are what made it too large, and a failure has no answer."""
    one = Publishing()
    one.world.reports["j1"] = [MessageTooLarge("too large"), None]
    group = one.whole(1)
    (message,) = group.messages
    answered = Result.decode(message.value).model_copy(update={"choices": CHAT["call alone"], "text": None})
    one.publish(replace(group, messages=(message._replace(value=answered.encode()),)))
    failed = Result.decode(one.world.sent[-1].value or b"")
    assert (failed.status, failed.choices, failed.finish_reason) == (Status.FAILED, (), None)


def test_a_repeated_answer_that_is_refused_changes_nothing() -> None:
    one = Publishing()
    one.world.reports["j1"] = [MessageTooLarge("too large")]
    one.publish(one.again(1))
    assert one.world.events == ["sent results recorded", "not acknowledged", "finished 1"]
    assert one.value("alphaloop_results_refused_total", code="result_too_large", done="not_repeated") == 1.0


def test_a_refusal_that_cannot_be_recorded_yet_is_settled_later() -> None:
    one = Publishing()
    one.world.settle_errors = [StoreUnavailable()]
    one.world.reports["j1"] = [MessageTooLarge("too large")] * 2 + [None]
    one.publish(one.whole(1))
    assert one.world.events[-3:] == ["acknowledged", "cleared [7]", "letter of j1"]
    assert one.world.events.count("replaced j1") == 1


WAIT_S = 60.0


def test_the_stream_of_a_replaced_result_ends_once_and_as_failed() -> None:
    one = Publishing()
    one.world.reports["j1"] = [MessageTooLarge("too large"), None]
    streamed = one.streamed(1, num_chunks=2)
    one.publish(streamed)
    ((value, headers),) = one.world.chunks
    assert read_chunk(value, headers).status is Status.FAILED


def test_every_copy_of_a_result_has_the_same_headers_and_the_same_final_chunk() -> None:
    """From memory, from the relay after a crash, and for a job that was delivered again."""
    carried = {"traceparent": f"00-{1:032x}-{1:016x}-01", "ce_causationid": "order-7"}
    one = Publishing()
    recorded = one.streamed(1, num_chunks=2, headers=carried)
    (message,) = recorded.messages
    one.publish(recorded)
    one.world.overdue = {message.id: [message]}
    one.now = 60.0
    one.publisher.turn(0.0)
    one.publish(answer_again(delivery("j1"), "j1", message.value, carried, one.intake))  # type: ignore[arg-type]
    assert one.world.topics() == [RESULTS, TOKENS] * 3
    first, second, third = one.world.sent[::2]
    assert first == second == third
    assert dict(first.headers).items() >= {name: value.encode() for name, value in carried.items()}.items()
    assert one.world.chunks == [one.world.chunks[0]] * 3


def test_while_a_chunk_is_under_way_every_turn_looks_for_its_acknowledgement() -> None:
    """Its job's outcome waits for that, although nothing else is to be published."""
    one = Publishing()
    one.publisher.turn(0.0)
    assert one.world.num_polls == 0
    stream = JobStream("j1", 1, {})
    one.publish(stream.add(TokenDelta("j1", "one ", 0), created=0, model="target"))
    assert not stream.is_settled
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(one.publisher.turn, WAIT_S)
        until(lambda: stream.is_settled, "the acknowledgement is handled while the turn waits", WAIT_S / 2)
        one.queue.put([one.recorded(1)])
        assert turn.result(WAIT_S) == 1
    assert one.world.num_polls == 1, "nothing is under way any more"


@pytest.mark.parametrize("is_told_at_once", [True, False])
def test_a_chunk_that_an_outage_kept_back_is_sent_again_before_its_result_is_cleared(is_told_at_once: bool) -> None:
    one = Publishing()
    if is_told_at_once:
        one.world.send_errors = [DeliveryFailed("full")]
    else:
        one.world.reports[TOKENS] = [DeliveryFailed("late")]
    stream = JobStream("j1", 1, {})
    one.publish(*(stream.add(TokenDelta("j1", text, 0), created=0, model="target") for text in ("one ", "two")))
    one.publish(one.streamed(1, num_chunks=2))
    text = StreamReader()
    for value, headers in one.world.chunks:
        text.take(read_chunk(value, headers))
    assert (text.text, text.end is not None) == ("one two", True)
    assert one.world.events[-2:] == ["cleared [1]", "finished 1"]


def test_a_stream_is_ended_before_its_result_is_cleared() -> None:
    """So that the relay of another worker ends it if this one dies."""
    one = Publishing()
    one.world.reports[TOKENS] = [DeliveryFailed("late"), DeliveryFailed("late")]
    one.publish(one.streamed(1, num_chunks=0))
    assert one.world.topics() == [RESULTS, TOKENS, TOKENS, TOKENS]
    assert one.world.events[-3:] == ["acknowledged", "cleared [1]", "finished 1"]


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
