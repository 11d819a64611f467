"""What a topic's name says, and topics that are deleted and made anew."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from alphaloop.kafka.topics import AGREEMENT_S, KnownTopicIds
from alphaloop.messages.job import TaskName
from alphaloop.messages.topics import (
    JOBS_PATTERN,
    dlq_topic,
    high_topic,
    is_high,
    jobs_topic,
    retry_delay_s,
    retry_topic,
    task_of,
    task_of_failures,
)

TASKS = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,99}", fullmatch=True)


@given(TASKS)
def test_both_lanes_are_of_the_task_and_share_its_dead_letters(task: str) -> None:
    for topic in (jobs_topic(task), high_topic(task)):
        assert task_of(topic) == task
        assert re.search(JOBS_PATTERN, topic)
    assert dlq_topic(high_topic(task)) == dlq_topic(jobs_topic(task)) == f"jobs.{task}.dlq"
    assert (is_high(high_topic(task)), is_high(jobs_topic(task))) == (True, False)


@given(TASKS, st.integers(1, 10**6))
def test_retries_and_dead_letters_are_of_a_tasks_failures_and_no_other_topic_is(task: str, delay_s: int) -> None:
    for topic in (dlq_topic(jobs_topic(task)), retry_topic(task, delay_s)):
        assert task_of_failures(topic) == task
    for topic in (jobs_topic(task), high_topic(task), dlq_topic("control"), "results", task, ".dlq"):
        assert task_of_failures(topic) is None


@given(TASKS)
def test_dead_letters_are_nobodys_jobs(task: str) -> None:
    for topic in (dlq_topic(jobs_topic(task)), task, f"x{jobs_topic(task)}", f"{jobs_topic(task)}.retry.soon"):
        assert task_of(topic) is None
        assert retry_delay_s(topic) is None
        assert not re.search(JOBS_PATTERN, topic)


@given(TASKS, st.integers(1, 10**6))
def test_a_retry_topic_names_its_delay_and_nobody_sends_jobs_there(task: str, delay_s: int) -> None:
    topic = retry_topic(task, delay_s)
    assert retry_delay_s(topic) == delay_s
    assert re.search(JOBS_PATTERN, topic)
    assert task_of(topic) is None


def test_delays_are_named_in_their_largest_unit() -> None:
    names = [retry_topic("code", delay_s) for delay_s in (10, 60, 90, 600, 7200)]
    assert names == [f"jobs.code.retry.{delay}" for delay in ("10s", "1m", "90s", "10m", "2h")]


@given(st.text(max_size=40))
def test_what_counts_as_a_task_is_what_the_settings_allow(text: str) -> None:
    try:
        TypeAdapter(TaskName).validate_python(text)
    except ValidationError:
        assert task_of(jobs_topic(text)) is None
    else:
        assert task_of(jobs_topic(text)) == text


@pytest.mark.parametrize("topic", ["jobs.", "jobs", "jobs.Code", "jobs.code\n", "jobs.-code", "results", "jobs.a.b"])
def test_other_topics_have_no_task(topic: str) -> None:
    assert task_of(topic) is None
    assert retry_delay_s(topic) is None


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


def test_the_answer_of_a_broker_that_lags_is_no_news(known: Known) -> None:
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
