"""Names of topics: which are jobs, and whose."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from alphaloop.kafka.topics import JOBS_PATTERN, dlq_topic, jobs_topic, task_of
from alphaloop.messages.text import TaskName

TASKS = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,99}", fullmatch=True)


@given(TASKS)
def test_a_task_is_found_again_in_its_topic(task: str) -> None:
    assert task_of(jobs_topic(task)) == task
    assert re.search(JOBS_PATTERN, jobs_topic(task))


@given(TASKS)
def test_dead_letters_and_retries_are_nobodys_jobs(task: str) -> None:
    for topic in (dlq_topic(jobs_topic(task)), f"{jobs_topic(task)}.retry.5m", task, f"x{jobs_topic(task)}"):
        assert task_of(topic) is None
        assert not re.search(JOBS_PATTERN, topic)


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
