"""What is said on Kafka: sent, acknowledged, cleared from the outbox, finished, in this order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

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
from alphaloop.store.outbox import OutboxMessage
from tests.fixtures.publishing import FinishedDeliveries, Publishing, delivery
from tests.fixtures.runs import outcome
from tests.fixtures.worker import until
from worker.dead_letters import failed_job
from worker.publishing import AnswerAgain, RecordedGroup
from worker.streams import JobStream


def test_a_result_is_cleared_only_after_its_acknowledgement_and_finished_last() -> None:
    one = Publishing()
    one.queue.put(one.recorded(1, 2))
    assert one.publisher.turn(0.0) == 1
    assert one.world.events == [
        "sent results result-1",
        "sent results result-2",
        "acknowledged",
        "cleared [1, 2]",
        "finished 1",
        "finished 2",
    ]
    assert len(one.queue) == 1, "what is in hand counts until the next turn"
    assert one.publisher.turn(0.0) == 0
    assert len(one.queue) == 0


FAILED = outcome("j1", status=Status.FAILED, error=Failure(code="decode_failed", message="no luck")).result


def test_a_failed_job_is_finished_by_the_thread_that_publishes_its_dead_letter() -> None:
    """Also when the outcome was recorded by a worker that died before it could publish the letter."""
    one = Publishing()
    failed = failed_job(delivery("j1", offset=1), FAILED, one.intake)  # type: ignore[arg-type]
    assert failed is not None
    recorded = one.recorded(1, 2)
    one.queue.put(replace(recorded, failed=(replace(failed, delivery=recorded.deliveries[0]),)))
    one.publisher.turn(0.0)
    assert one.world.events[-4:] == ["acknowledged", "cleared [1, 2]", "finished 2", "letter of j1"]
    one.queue.put(one.again(1, FAILED))
    one.publisher.turn(0.0)
    assert one.world.events[-2:] == ["acknowledged", "letter of j1"]
    assert {dead.reason.code for dead in one.dead} == {"decode_failed"}


@pytest.mark.parametrize("other", [FAILED.replace(b"failed", b"expired", 1), b"?", b'"\\"status\\":\\"failed\\""'])
def test_other_outcomes_have_no_dead_letter(other: bytes) -> None:
    assert failed_job(delivery("j1"), other, FinishedDeliveries()) is None  # type: ignore[arg-type]


def test_everything_that_waits_shares_one_acknowledgement() -> None:
    one = Publishing()
    one.queue.put(one.recorded(1), one.again(2), one.recorded(4))
    assert one.publisher.turn(0.0) == 3
    assert one.world.events.count("acknowledged") == 1
    assert one.sent() == ["result-1", "recorded", "result-4"]
    assert one.world.events[-4:] == ["cleared [1, 4]", "finished 1", "finished 2", "finished 4"]
    assert one.value("alphaloop_jobs_answered_again_total") == 1.0


@pytest.mark.parametrize("failing", ["j1", "j2"])
def test_only_what_was_not_acknowledged_is_sent_again(failing: str) -> None:
    one = Publishing()
    one.world.reports[failing] = [DeliveryFailed("timed out"), DeliveryFailed("timed out"), None]
    one.queue.put(one.recorded(1), one.recorded(2))
    one.publisher.turn(0.0)
    number = failing[1]
    assert sorted(one.sent()) == sorted(["result-1", "result-2", f"result-{number}", f"result-{number}"])
    assert one.world.events[-3:] == ["cleared [1, 2]", "finished 1", "finished 2"]
    assert not any(event.startswith(("cleared", "finished")) for event in one.world.events[:-3])


def test_a_full_buffer_is_tried_again() -> None:
    one = Publishing()
    one.world.send_errors = [DeliveryFailed("the send buffer stayed full")]
    one.queue.put(one.recorded(1), one.recorded(2))
    one.publisher.turn(0.0)
    assert one.sent() == ["result-1", "result-2"]
    assert one.world.events[-3:] == ["cleared [1, 2]", "finished 1", "finished 2"]


def test_an_outbox_that_cannot_be_cleared_keeps_deliveries_unfinished_and_sends_nothing_twice() -> None:
    one = Publishing()
    one.world.delete_errors = [StoreUnavailable(), StoreUnavailable()]
    one.queue.put(one.recorded(1))
    one.publisher.turn(0.0)
    assert one.world.events == ["sent results result-1", "acknowledged", "cleared [1]", "finished 1"]


def test_in_a_hurry_what_is_not_acknowledged_stays_in_the_outbox() -> None:
    one = Publishing()
    one.hurry.set()
    one.world.reports["j1"] = [DeliveryFailed("nobody answers")]
    one.queue.put(one.recorded(1))
    with pytest.raises(DeliveryFailed):
        one.publisher.turn(0.0)
    assert one.world.events == ["sent results result-1", "not acknowledged"]


def test_a_dead_producer_ends_the_thread() -> None:
    one = Publishing()
    one.world.reports["j1"] = [FatalBrokerError("fenced")]
    one.queue.put(one.recorded(1))
    with pytest.raises(FatalBrokerError):
        one.publisher.turn(0.0)
    assert one.intake.finished == []


def test_outcomes_that_lost_their_claims_publish_nothing_and_finish_their_deliveries() -> None:
    one = Publishing()
    one.queue.put(RecordedGroup((), (delivery("j7", offset=7),), one.intake))  # type: ignore[arg-type]
    one.publisher.turn(0.0)
    assert one.world.events == ["finished 7"]


def test_what_was_recorded_and_never_published_is_relayed_when_due() -> None:
    one = Publishing()
    orphan = OutboxMessage(9, RESULTS, b"k", b"orphan", {})
    one.world.overdue = {9: [orphan], 10: []}
    one.publisher.turn(0.0)
    assert one.world.events == ["sent results orphan", "acknowledged", "cleared [9, 10]"]
    one.world.overdue = {9: [orphan]}
    one.now = 59.0
    one.publisher.turn(0.0)
    assert one.world.relayed_older_than_s == [60.0]
    one.now = 60.0
    one.publisher.turn(0.0)
    assert one.world.relayed_older_than_s == [60.0, 60.0]
    assert one.world.events.count("sent results orphan") == 2


def test_a_long_queue_of_the_dead_is_relayed_at_once() -> None:
    one = Publishing()
    for first in (1, 5):
        one.world.overdue = {
            n: [OutboxMessage(n, RESULTS, b"k%d" % n, b"r%d" % n, {})] for n in range(first, first + 4)
        }
        one.publisher.turn(0.0)
    assert one.sent() == [f"r{n}" for n in range(1, 9)]


def test_a_result_that_is_refused_is_replaced_and_its_neighbours_go_on() -> None:
    one = Publishing()
    one.world.reports["j2"] = [MessageTooLarge("too large"), MessageTooLarge("too large"), None]
    one.queue.put(one.whole(1, 2, 3))
    one.publisher.turn(0.0)
    assert one.world.events[-5:-3] == ["acknowledged", "cleared [7]"]
    assert one.world.events[-3:] == ["finished 1", "finished 3", "letter of j2"]
    assert one.dead[0].reason.code == "result_too_large"
    assert "replaced j2" in one.world.events
    published = [Result.decode(value.encode()) for value in one.sent()]
    assert [result.job_id for result in published] == ["j1", "j2", "j3", "j2", "j2"], "once more alone, then replaced"
    instead = published[-1]
    assert (instead.status, instead.text, instead.attempt) == (Status.FAILED, None, 1)
    assert instead.error is not None
    assert instead.error.code == "result_too_large"
    assert one.value("alphaloop_results_refused_total", code="result_too_large", done="replaced") == 1.0


def test_what_is_refused_only_together_with_others_is_published_alone() -> None:
    """Kafka refuses a batch that is larger than the topic's limit, although no message of it is."""
    one = Publishing()
    for key in ("j1", "j2"):
        one.world.reports[key] = [MessageTooLarge("too large"), None]
    one.queue.put(one.whole(1, 2))
    one.publisher.turn(0.0)
    assert len(one.sent()) == 4
    assert not any(event.startswith(("replaced", "set aside")) for event in one.world.events)
    assert one.world.events[-3:] == ["cleared [7]", "finished 1", "finished 2"]


def test_a_replacement_that_is_refused_too_is_set_aside() -> None:
    one = Publishing()
    one.world.reports[RESULTS] = [MessageRefused("invalid")] * 2 + [None]
    one.queue.put(one.whole(1))
    one.publisher.turn(0.0)
    assert [event for event in one.world.events if event.startswith(("replaced", "set aside"))] == [
        "replaced j1",
        "set aside j1: invalid",
    ]
    assert one.world.events[-2:] == ["cleared [7]", "letter of j1"]
    assert one.value("alphaloop_results_refused_total", code="result_refused", done="set_aside") == 1.0


def test_a_repeated_answer_that_is_refused_changes_nothing() -> None:
    one = Publishing()
    one.world.reports["j1"] = [MessageTooLarge("too large")]
    one.queue.put(one.again(1))
    one.publisher.turn(0.0)
    assert one.world.events == ["sent results recorded", "not acknowledged", "finished 1"]
    assert one.value("alphaloop_results_refused_total", code="result_too_large", done="not_repeated") == 1.0


def test_a_refusal_that_cannot_be_recorded_yet_is_settled_later() -> None:
    one = Publishing()
    one.world.settle_errors = [StoreUnavailable()]
    one.world.reports["j1"] = [MessageTooLarge("too large")] * 2 + [None]
    one.queue.put(one.whole(1))
    one.publisher.turn(0.0)
    assert one.world.events[-3:] == ["acknowledged", "cleared [7]", "letter of j1"]
    assert one.world.events.count("replaced j1") == 1


@pytest.mark.parametrize("may_create", [True, False])
def test_a_missing_topic_is_told_made_where_allowed_and_waited_for(may_create: bool) -> None:
    one = Publishing()
    one.world.reports[RESULTS] = [TopicUnavailable("no such topic")] * 3 + [None]
    one.world.create_errors = [] if may_create else [BrokerError("not allowed")] * 3
    one.queue.put(one.whole(1))
    one.publisher.turn(0.0)
    assert one.shown == [(RESULTS, True), (RESULTS, False)], "said once, and once that it works again"
    assert one.topics.reason(RESULTS) is None
    assert one.world.events.count("created results") == 3
    assert one.world.events[-2:] == ["cleared [7]", "finished 1"]
    assert one.value("alphaloop_topic_unavailable", topic=RESULTS) is None


def test_a_poisoned_row_of_a_dead_worker_is_set_aside_and_its_neighbours_go_on() -> None:
    """Nobody knows whether the dead worker published it, so it is not replaced."""
    one = Publishing()
    one.world.reports["bad"] = [MessageTooLarge("too large")] * 2
    rows = {n: [OutboxMessage(n, RESULTS, key, b"of " + key, {})] for n, key in ((8, b"bad"), (9, b"good"))}
    one.world.overdue = rows
    one.publisher.turn(0.0)
    assert "set aside bad: too large" in one.world.events
    assert one.world.events[-1] == "cleared [8, 9]"
    assert "of good" in one.sent()
    assert not any(event.startswith("replaced") for event in one.world.events)
    assert one.value("alphaloop_results_set_aside") == 1.0


WAIT_S = 60.0


def test_the_stream_of_a_replaced_result_ends_once_and_as_failed() -> None:
    one = Publishing()
    one.world.reports["j1"] = [MessageTooLarge("too large"), None]
    streamed = one.streamed(1, num_chunks=2)
    one.queue.put(streamed)
    one.publisher.turn(0.0)
    ((value, headers),) = one.world.chunks
    assert read_chunk(value, headers).status is Status.FAILED


def test_chunks_are_sent_in_order_before_the_result_that_ends_them() -> None:
    one = Publishing()
    stream = JobStream("j1", 1, {})
    chunks = [stream.add(text, created=0, model="target") for text in ("one ", "two")]
    one.queue.put(*chunks, one.streamed(1, num_chunks=2))
    assert one.publisher.turn(0.0) == 3
    assert one.world.topics() == [TOKENS, TOKENS, RESULTS, TOKENS], "the stream ends once the result is there"
    text = StreamReader()
    for value, headers in one.world.chunks:
        text.take(read_chunk(value, headers))
    assert text.text == "one two"
    assert text.end is not None
    assert (text.end.attempt, text.end.seq, text.end.status) == (1, 2, Status.SUCCEEDED)


def test_every_copy_of_a_result_has_the_same_headers_and_the_same_final_chunk() -> None:
    """From memory, from the relay after a crash, and for a job that was delivered again."""
    carried = {"traceparent": f"00-{1:032x}-{1:016x}-01", "ce_causationid": "order-7"}
    one = Publishing()
    recorded = one.streamed(1, num_chunks=2, headers=carried)
    (message,) = recorded.messages
    one.queue.put(recorded)
    one.publisher.turn(0.0)
    one.world.overdue = {message.id: [message]}
    one.now = 60.0
    one.publisher.turn(0.0)
    one.queue.put(AnswerAgain(delivery("j1"), "j1", message.value, carried, one.intake))  # type: ignore[arg-type]
    one.publisher.turn(0.0)
    assert one.world.topics() == [RESULTS, TOKENS] * 3
    first, second, third = one.world.sent[::2]
    assert first == second == third
    assert dict(first.headers).items() >= {name: value.encode() for name, value in carried.items()}.items()
    assert one.world.chunks == [one.world.chunks[0]] * 3


@pytest.mark.parametrize("status", [Status.FAILED, Status.EXPIRED, Status.CANCELLED])
def test_a_job_without_a_text_ends_its_stream_too(status: Status) -> None:
    one = Publishing()
    one.queue.put(one.streamed(1, num_chunks=0, status=status, error=Failure(code="why", message="because")))
    one.publisher.turn(0.0)
    ((value, headers),) = one.world.chunks
    chunk = read_chunk(value, headers)
    assert (chunk.seq, chunk.status, chunk.text, chunk.finish_reason) == (0, status, "", None)
    assert chunk.error is not None
    assert chunk.error.code == "why"


def test_while_a_chunk_is_under_way_every_turn_looks_for_its_acknowledgement() -> None:
    """Its job's outcome waits for that, although nothing else is to be published."""
    one = Publishing()
    one.publisher.turn(0.0)
    assert one.world.num_polls == 0
    stream = JobStream("j1", 1, {})
    one.queue.put(stream.add("one ", created=0, model="target"))
    one.publisher.turn(0.0)
    assert not stream.is_settled
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(one.publisher.turn, WAIT_S)
        until(lambda: stream.is_settled, "the acknowledgement is handled while the turn waits", WAIT_S / 2)
        one.queue.put(one.recorded(1))
        assert turn.result(WAIT_S) == 1
    assert one.world.num_polls == 1, "nothing is under way any more"


def test_chunks_alone_are_not_waited_for() -> None:
    one = Publishing()
    one.queue.put(JobStream("j1", 1, {}).add("one ", created=0, model="target"))
    assert one.publisher.turn(0.0) == 1
    assert "acknowledged" not in one.world.events


@pytest.mark.parametrize("error", [TopicUnavailable("no topic"), MessageTooLarge("large")])
@pytest.mark.parametrize("is_told_at_once", [True, False])
def test_a_chunk_that_does_not_arrive_is_dropped_and_results_go_on(error: BrokerError, is_told_at_once: bool) -> None:
    one = Publishing()
    if is_told_at_once:
        one.world.send_errors = [error]
    else:
        one.world.reports[TOKENS] = [error]
    one.queue.put(JobStream("j1", 1, {}).add("one ", created=0, model="target"), one.recorded(1))
    one.publisher.turn(0.0)
    assert one.world.events[-2:] == ["cleared [1]", "finished 1"]
    assert one.value("alphaloop_chunks_dropped_total", code=error.code) == 1.0


@pytest.mark.parametrize("is_told_at_once", [True, False])
def test_a_chunk_that_an_outage_kept_back_is_sent_again_before_its_result_is_cleared(is_told_at_once: bool) -> None:
    one = Publishing()
    if is_told_at_once:
        one.world.send_errors = [DeliveryFailed("full")]
    else:
        one.world.reports[TOKENS] = [DeliveryFailed("late")]
    stream = JobStream("j1", 1, {})
    one.queue.put(*(stream.add(text, created=0, model="target") for text in ("one ", "two")))
    one.publisher.turn(0.0)
    one.queue.put(one.streamed(1, num_chunks=2))
    one.publisher.turn(0.0)
    text = StreamReader()
    for value, headers in one.world.chunks:
        text.take(read_chunk(value, headers))
    assert (text.text, text.end is not None) == ("one two", True)
    assert one.world.events[-2:] == ["cleared [1]", "finished 1"]


def test_a_stream_is_ended_before_its_result_is_cleared() -> None:
    """So that the relay of another worker ends it if this one dies."""
    one = Publishing()
    one.world.reports[TOKENS] = [DeliveryFailed("late"), DeliveryFailed("late")]
    one.queue.put(one.streamed(1, num_chunks=0))
    one.publisher.turn(0.0)
    assert one.world.topics() == [RESULTS, TOKENS, TOKENS, TOKENS]
    assert one.world.events[-3:] == ["acknowledged", "cleared [1]", "finished 1"]
