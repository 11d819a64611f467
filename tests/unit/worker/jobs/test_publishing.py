"""What is said on Kafka: sent, acknowledged, cleared from the outbox, finished, in this order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphaloop.errors import (
    DeliveryFailed,
    FatalBrokerError,
    StoreUnavailable,
)
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Failure, Status
from alphaloop.store.outbox import OutboxMessage
from tests.fixtures.claimed import FinishedDeliveries, delivery
from tests.fixtures.publishing import Publishing
from tests.fixtures.runs import outcome
from worker.dead_letters import failed_job
from worker.publishing import RecordedGroup


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
