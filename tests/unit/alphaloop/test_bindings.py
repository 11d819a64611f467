"""Which target's workers read which topics: every topic of jobs has exactly one target, whatever the task list says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.messages.topics import task_read_from
from alphaloop.settings import Bindings, TaskSettings

TOPICS = (
    *("control", "results", "jobs.code", "jobs.code.dlq", "jobs.code.high", "jobs.code.retry.10s"),
    *("jobs.new", "jobs.sql", "jobs.sql.retry.1m"),
)


def bound(models: Mapping[str, str | None], default_model: str | None) -> Bindings:
    return Bindings({task: TaskSettings(model=model) for task, model in models.items()}, default_model)


@pytest.mark.parametrize(
    ("bindings", "by_target"),
    [
        (bound({}, None), {"a": {"code", "new", "sql"}, "b": {"code", "new", "sql"}}),
        (bound({"code": None}, "a"), {"a": {"code", "new", "sql"}, "b": set()}),
        (bound({"code": None, "sql": "b"}, "a"), {"a": {"code", "new"}, "b": {"sql"}, "c": set()}),
        (bound({"code": "a", "sql": "a"}, "b"), {"a": {"code", "sql"}, "b": {"new"}}),
        (bound({"code": "c"}, "a"), {"a": {"new", "sql"}, "b": set(), "c": {"code"}}),
    ],
)
def test_which_tasks_a_targets_workers_read(bindings: Bindings, by_target: Mapping[str, set[str]]) -> None:
    for target, tasks in by_target.items():
        assert bindings.topics_of(target, TOPICS) == {one for one in TOPICS if task_read_from(one) in tasks}
        assert {task for task in ("code", "new", "sql") if bindings.is_of(target, task)} == tasks


def test_the_targets_that_are_named_the_default_first() -> None:
    assert bound({"code": None}, None).targets == ()
    assert bound({"code": "c", "sql": "b", "math": "c"}, "a").targets == ("a", "c", "b")
    assert [bound({"code": "b"}, "a").target_of(task) for task in ("code", "unknown")] == ["b", "a"]
    assert bound({}, None).target_of("code") is None


NAMES = st.sampled_from(["code", "sql", "math", "chat", "x-1"])
TARGETS = st.sampled_from(["a", "b", "c"])
SUFFIXES = st.sampled_from(["", ".high", ".retry.10s", ".retry.10m", ".dlq", ".retry.10s.dlq", ".high.dlq", ".other"])


@given(
    st.dictionaries(NAMES, st.none() | TARGETS),
    TARGETS,
    st.lists(st.builds(lambda task, suffix: f"jobs.{task}{suffix}", NAMES, SUFFIXES)),
)
def test_every_topic_of_jobs_has_exactly_one_target_and_no_other_topic_has_one(
    models: dict[str, str | None], default_model: str, topics: list[str]
) -> None:
    bindings = bound(models, default_model)
    read = {target: bindings.topics_of(target, topics) for target in {*bindings.targets, "a", "b", "c"}}
    for topic in topics:
        readers = [target for target, its in read.items() if topic in its]
        task = task_read_from(topic)
        assert readers == ([] if task is None else [bindings.target_of(task)])
