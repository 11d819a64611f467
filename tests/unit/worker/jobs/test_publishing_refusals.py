"""What Kafka refuses for good is replaced or set aside, and its neighbours go on."""

from __future__ import annotations

import pytest

from alphaloop.errors import (
    BrokerError,
    MessageRefused,
    MessageTooLarge,
    StoreUnavailable,
    TopicUnavailable,
)
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result, Status
from alphaloop.store.outbox import OutboxMessage
from tests.fixtures.publishing import Publishing


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
