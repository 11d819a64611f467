"""The ids under which a client reads its topics."""

from __future__ import annotations

import pytest

from alphaloop.kafka.topics import AGREEMENT_S, KnownTopicIds


class Known:
    """Ids that are known, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.ids = KnownTopicIds(lambda: self.now_s)

    def learn(self, **ids: str) -> frozenset[str]:
        """What was made anew, when every broker knows."""
        self.ids.learn(ids)
        self.now_s += AGREEMENT_S
        return self.ids.made_anew


@pytest.fixture
def known() -> Known:
    return Known()


def test_offsets_belong_to_the_old_topic_until_the_client_begins_anew(known: Known) -> None:
    assert not known.learn(control="first", results="one")
    assert known.learn(control="second", results="one") == {"control"}
    assert known.ids.beside("control") == "topic_id=first"
    known.ids.begin_anew()
    assert not known.ids.made_anew
    assert (known.ids.beside("control"), known.ids.beside("results")) == ("topic_id=second", "topic_id=one")


def test_a_topic_that_is_made_anew_twice_is_noticed_twice(known: Known) -> None:
    known.learn(control="first")
    for one in ("second", "third"):
        assert known.learn(control=one) == {"control"}
        known.ids.begin_anew()


def test_the_answer_of_a_broker_that_lags_behind_is_no_news(known: Known) -> None:
    for one in ("first", "second"):
        known.learn(control=one)
        known.ids.begin_anew()
    assert not known.learn(control="first")
    assert known.ids.beside("control") == "topic_id=second"


def test_every_broker_is_given_time_to_learn_of_the_newest_topic(known: Known) -> None:
    known.learn(control="first")
    known.ids.learn({"control": "second"})
    known.now_s += AGREEMENT_S - 1
    known.ids.learn({"control": "second"})
    assert not known.ids.made_anew
    known.now_s += 1
    assert known.ids.made_anew == {"control"}
    known.ids.learn({"control": "third"})
    assert not known.ids.made_anew
