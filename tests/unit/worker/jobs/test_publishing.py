"""What is said on Kafka: sent, acknowledged, cleared from the outbox, finished, in this order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from alphaloop.errors import DeliveryFailed, FatalBrokerError, InvalidField, StoreUnavailable
from alphaloop.kafka.topics import RESULTS, TOKENS
from alphaloop.messages import Failure, Result, Status, StreamReader, read_chunk
from alphaloop.store.outbox import OutboxMessage
from tests.fixtures.claimed import NOW, FinishedDeliveries, delivery, validation
from worker.jobs.letters import Letters, failed_job
from worker.jobs.publishing import AnswerAgain, Publisher, PublishingQueue, Recorded, Refused
from worker.jobs.streaming import JobStream
from worker.metrics import WorkerMetrics
from worker.retry import Retry


class World:
    """A broker and an outbox that note what is asked of them, in order, and fail as told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: list[tuple[str, bytes, Sequence[tuple[str, bytes]]]] = []
        self.flush_errors: list[Exception] = []
        self.send_errors: list[Exception] = []
        self.delete_errors: list[Exception] = []
        self.overdue: list[OutboxMessage] = []
        self.relayed_older_than_s: list[float] = []

    def send(
        self, topic: str, *, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        if self.send_errors:
            raise self.send_errors.pop(0)
        self.events.append(f"sent {topic} {(value or b'').decode()}")
        self.sent.append((topic, value or b"", headers))

    def topics(self) -> list[str]:
        return [topic for topic, _, _ in self.sent]

    @property
    def chunks(self) -> list[tuple[bytes, Sequence[tuple[str, bytes]]]]:
        return [(value, headers) for topic, value, headers in self.sent if topic == TOKENS]

    def flush(self, timeout_s: float) -> None:
        if self.flush_errors:
            self.events.append("not acknowledged")
            raise self.flush_errors.pop(0)
        self.events.append("acknowledged")

    def delete(self, ids: Collection[int]) -> None:
        if self.delete_errors:
            raise self.delete_errors.pop(0)
        if ids:
            self.events.append(f"cleared {sorted(ids)}")

    def relay(self, publish: Callable[[Sequence[OutboxMessage]], None], *, older_than_s: float, limit: int) -> int:
        self.relayed_older_than_s.append(older_than_s)
        messages, self.overdue = self.overdue, []
        if messages:
            publish(messages)
        return len(messages)


class InstantEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Publishing:
    """A publisher with everything around it."""

    def __init__(self) -> None:
        self.world, self.now, self.hurry = World(), 0.0, InstantEvent()
        self.intake = FinishedDeliveries(self.world.events)
        self.metrics = WorkerMetrics()
        self.queue = PublishingQueue(max_items=100, max_bytes=1 << 20, is_hurried=self.hurry.is_set)
        self.publisher = Publisher(
            self.queue,
            self.world,
            self.world,  # type: ignore[arg-type]
            self.metrics,
            letters=Letters(validation(), "g"),
            ensure_dead_letter_topic=lambda topic: self.world.events.append(f"ensured {topic}"),
            model="target",
            retry=Retry(self.hurry),
            relay_after_s=60.0,
            clock=lambda: self.now,
        )

    def recorded(self, *numbers: int) -> Recorded:
        messages = tuple(OutboxMessage(n, RESULTS, b"j%d" % n, b"result-%d" % n, {}) for n in numbers)
        return Recorded(messages, tuple(delivery(f"j{n}", offset=n) for n in numbers), self.intake)  # type: ignore[arg-type]

    def again(self, number: int, outcome: bytes = b"recorded") -> AnswerAgain:
        return AnswerAgain(delivery(f"j{number}", offset=number), f"j{number}", outcome, {}, self.intake)  # type: ignore[arg-type]

    def streamed(
        self,
        number: int,
        *,
        num_chunks: int,
        status: Status = Status.SUCCEEDED,
        error: Failure | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Recorded:
        result = Result(
            job_id=f"j{number}",
            status=status,
            task="code",
            attempt=1,
            num_chunks=num_chunks,
            error=error,
            finish_reason=None if error else "stop",
            recorded_at=NOW,
        )
        message = OutboxMessage(number, RESULTS, b"j%d" % number, result.encode(), headers or {})
        return Recorded((message,), (delivery(f"j{number}", offset=number),), self.intake)  # type: ignore[arg-type]

    def refused(self, offset: int) -> Refused:
        error = InvalidField("expected a number", field="body.max_tokens")
        return Refused(delivery("bad", offset=offset, value=b"?"), error, self.intake)  # type: ignore[arg-type]


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


FAILED = Result(
    job_id="j1",
    status=Status.FAILED,
    task="code",
    error=Failure(code="decode_failed", message="no luck"),
    attempt=4,
    recorded_at=NOW,
).encode()


def test_a_failed_job_is_finished_when_result_and_dead_letter_are_acknowledged() -> None:
    """Also when the outcome was recorded by a worker that died before it could publish the letter."""
    one = Publishing()
    failed = failed_job(delivery("j1", offset=1, value=b"asked"), FAILED)
    assert failed is not None
    one.world.flush_errors = [DeliveryFailed("1 refused")]
    one.queue.put(replace(one.recorded(1), failed=(failed,)))
    one.publisher.turn(0.0)
    round_ = ["sent results result-1", "ensured jobs.code", "sent jobs.code.dlq asked"]
    again = [event for event in round_ if not event.startswith("ensured")]
    assert one.world.events == [*round_, "not acknowledged", *again, "acknowledged", "cleared [1]", "finished 1"]
    one.world.events.clear()
    one.queue.put(one.again(1, FAILED))
    one.publisher.turn(0.0)
    letter = one.world.sent[-1]
    assert one.world.events[-3:] == ["sent jobs.code.dlq " + letter[1].decode(), "acknowledged", "finished 1"]
    assert dict(letter[2])["__dlq.errors.exception"] == b"decode_failed"
    assert dict(letter[2])["alphaloop-job-id"] == b"j1"
    assert dict(letter[2])["alphaloop-outcome"] == b"failed"
    assert one.metrics.registry.get_sample_value("alphaloop_dead_letters_total", {"code": "decode_failed"}) == 2.0


@pytest.mark.parametrize("outcome", [FAILED.replace(b"failed", b"expired", 1), b"?", b'"\\"status\\":\\"failed\\""'])
def test_other_outcomes_have_no_dead_letter(outcome: bytes) -> None:
    assert failed_job(delivery("j1"), outcome) is None


def test_everything_that_waits_shares_one_acknowledgement() -> None:
    one = Publishing()
    one.queue.put(one.recorded(1), one.again(2), one.refused(3), one.recorded(4))
    assert one.publisher.turn(0.0) == 4
    assert one.world.events.count("acknowledged") == 1
    sent = [event for event in one.world.events if event.startswith("sent")]
    assert sent == ["sent results result-1", "sent results recorded", "sent jobs.code.dlq ?", "sent results result-4"]
    assert one.world.events[-5:] == ["cleared [1, 4]", "finished 1", "finished 2", "finished 3", "finished 4"]
    value = one.metrics.registry.get_sample_value
    assert value("alphaloop_jobs_answered_again_total") == 1.0
    assert value("alphaloop_dead_letters_total", {"code": "invalid_field"}) == 1.0


@pytest.mark.parametrize("place", ["flush_errors", "send_errors"])
def test_what_was_not_acknowledged_is_sent_again_from_the_start(place: str) -> None:
    one = Publishing()
    setattr(one.world, place, [DeliveryFailed("1 refused"), DeliveryFailed("1 refused")])
    one.queue.put(one.recorded(1), one.recorded(2))
    one.publisher.turn(0.0)
    told = one.world.events
    assert told[-6:] == [
        "sent results result-1",
        "sent results result-2",
        "acknowledged",
        "cleared [1, 2]",
        "finished 1",
        "finished 2",
    ]
    assert not any(event.startswith(("cleared", "finished")) for event in told[:-4])
    assert told.count("not acknowledged") == (2 if place == "flush_errors" else 0)


def test_an_outbox_that_cannot_be_cleared_keeps_deliveries_unfinished_and_sends_nothing_twice() -> None:
    one = Publishing()
    one.world.delete_errors = [StoreUnavailable(), StoreUnavailable()]
    one.queue.put(one.recorded(1))
    one.publisher.turn(0.0)
    assert one.world.events == ["sent results result-1", "acknowledged", "cleared [1]", "finished 1"]


def test_in_a_hurry_what_is_not_acknowledged_stays_in_the_outbox() -> None:
    one = Publishing()
    one.hurry.set()
    one.world.flush_errors = [DeliveryFailed("nobody answers")]
    one.queue.put(one.recorded(1))
    with pytest.raises(DeliveryFailed):
        one.publisher.turn(0.0)
    assert one.world.events == ["sent results result-1", "not acknowledged"]


def test_a_dead_producer_ends_the_thread() -> None:
    one = Publishing()
    one.world.flush_errors = [FatalBrokerError("fenced")]
    one.queue.put(one.recorded(1))
    with pytest.raises(FatalBrokerError):
        one.publisher.turn(0.0)
    assert one.intake.finished == []


def test_outcomes_that_lost_their_claims_publish_nothing_and_finish_their_deliveries() -> None:
    one = Publishing()
    one.queue.put(Recorded((), (delivery("j7", offset=7),), one.intake))  # type: ignore[arg-type]
    one.publisher.turn(0.0)
    assert one.world.events == ["acknowledged", "finished 7"]


def test_chunks_are_sent_in_order_before_the_result_that_ends_them() -> None:
    one = Publishing()
    stream = JobStream("j1", 1, {})
    chunks = [stream.add(text, created=0, model="target") for text in ("one ", "two")]
    one.queue.put(*chunks, one.streamed(1, num_chunks=2))
    assert one.publisher.turn(0.0) == 3
    assert one.world.topics() == [TOKENS, TOKENS, TOKENS, RESULTS]
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
    one.world.overdue = [message]
    one.now = 60.0
    one.publisher.turn(0.0)
    one.queue.put(AnswerAgain(delivery("j1"), "j1", message.value, carried, one.intake))  # type: ignore[arg-type]
    one.publisher.turn(0.0)
    assert one.world.topics() == [TOKENS, RESULTS] * 3
    first, second, third = one.world.sent[1::2]
    assert first == second == third
    assert dict(first[2]).items() >= {name: value.encode() for name, value in carried.items()}.items()
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


def test_chunks_alone_are_not_waited_for() -> None:
    one = Publishing()
    one.queue.put(JobStream("j1", 1, {}).add("one ", created=0, model="target"))
    assert one.publisher.turn(0.0) == 1
    assert "acknowledged" not in one.world.events


def test_a_dead_letter_topic_is_ensured_once_before_its_first_letter() -> None:
    one = Publishing()
    one.queue.put(one.refused(1))
    one.publisher.turn(0.0)
    one.queue.put(one.refused(2))
    one.publisher.turn(0.0)
    assert one.world.events[:2] == ["ensured jobs.code", "sent jobs.code.dlq ?"]
    assert one.world.events.count("ensured jobs.code") == 1
    assert [delivery.record.offset for delivery in one.intake.finished] == [1, 2]


def test_what_was_recorded_and_never_published_is_relayed_when_due() -> None:
    one = Publishing()
    orphan = OutboxMessage(9, RESULTS, b"k", b"orphan", {})
    one.world.overdue = [orphan]
    one.publisher.turn(0.0)
    assert one.world.events == ["sent results orphan", "acknowledged"]
    one.world.overdue = [orphan]
    one.now = 59.0
    one.publisher.turn(0.0)
    assert one.world.relayed_older_than_s == [60.0]
    one.now = 60.0
    one.publisher.turn(0.0)
    assert one.world.relayed_older_than_s == [60.0, 60.0]
    assert one.world.events.count("sent results orphan") == 2
