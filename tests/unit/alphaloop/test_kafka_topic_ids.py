"""The ids under which a client reads its topics."""

from __future__ import annotations

from alphaloop.kafka.topic_ids import KnownTopicIds


def test_offsets_belong_to_the_old_topic_until_the_client_begins_anew() -> None:
    ids = KnownTopicIds()
    ids.learn({"jobs.code": "first", "jobs.sql": "one"})
    assert not ids.made_anew
    ids.learn({"jobs.code": "second", "jobs.sql": "one"})
    assert (ids.made_anew, ids.beside("jobs.code")) == ({"jobs.code"}, "topic_id=first")
    ids.begin_anew()
    assert (ids.made_anew, ids.beside("jobs.code")) == (frozenset(), "topic_id=second")
    assert ids.beside("jobs.sql") == "topic_id=one"


def test_a_topic_that_is_made_anew_twice_is_noticed_twice() -> None:
    ids = KnownTopicIds()
    for number in range(3):
        ids.learn({"control": f"id {number}"})
        assert ids.made_anew == ({"control"} if number else frozenset())
        ids.begin_anew()


def test_the_answer_of_a_broker_that_lags_behind_is_no_news() -> None:
    ids = KnownTopicIds()
    for one in ("first", "second"):
        ids.learn({"control": one})
        ids.begin_anew()
    ids.learn({"control": "first"})
    assert (ids.made_anew, ids.beside("control")) == (frozenset(), "topic_id=second")
