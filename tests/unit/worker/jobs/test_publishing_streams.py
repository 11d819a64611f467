"""Chunks of streams: sent in order before the result that ends them, and sent again after an outage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from alphaloop.errors import (
    BrokerError,
    DeliveryFailed,
    MessageTooLarge,
    TopicUnavailable,
)
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import Failure, Status, StreamReader, read_chunk
from tests.fixtures.claimed import delivery
from tests.fixtures.publishing import Publishing
from tests.fixtures.worker import until
from worker.publishing import AnswerAgain
from worker.streams import JobStream

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
