"""The task list under a running worker: what is read follows it, and nothing is put aside before its topic leaves."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from alphaloop.errors import BrokerUnavailable, InvalidField, UnknownTask
from alphaloop.settings import TasksFile, load_settings
from tests.fakes import FakeEngine
from tests.fixtures.publishing import delivery, validation
from worker.intake.target_tasks import TargetTasks
from worker.intake.validation import ReadyJob

TOPICS = ["jobs.code", "jobs.code.high", "jobs.code.retry.10s", "jobs.code.dlq", "jobs.new", "jobs.sql", "results"]
BOUND = 'default_model = "fake"\n[tasks.code]\n[tasks.sql]\nmodel = "other"\n'


class Followed:
    """A worker's tasks over a file that the test edits and a broker that the test makes topics at."""

    def __init__(self, folder: Path, text: str, target: str = "a") -> None:
        self.path = folder / "tasks.toml"
        self.path.write_text(text, encoding="utf-8")
        self.topics: Collection[str] | None = TOPICS
        self.lists: list[Collection[str]] = []
        self.bound = TargetTasks(
            target,
            load_settings(folder).bindings,
            file=TasksFile(folder),
            topics_now=self._ask,
            read_topics=self.lists.append,
        )
        self.bound.look()

    def _ask(self) -> Collection[str]:
        if self.topics is None:
            raise BrokerUnavailable("away")
        return self.topics

    def edit(self, text: str) -> None:
        self.path.write_text(text, encoding="utf-8")
        self.bound.look()


ALL = {"jobs.code", "jobs.code.high", "jobs.code.retry.10s", "jobs.new", "jobs.sql"}
CODE = {"jobs.code", "jobs.code.high", "jobs.code.retry.10s"}


def test_the_list_follows_the_file_and_a_file_that_is_wrong_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = Followed(tmp_path, "[tasks.code]\n[tasks.sql]\n")
    assert its.lists == [ALL]
    its.edit('default_model = "a"\n[tasks.code]\n[tasks.sql]\nmodel = "b"\n')
    assert its.lists[1:] == [ALL - {"jobs.sql"}]
    for wrong in ("[tasks", '[tasks.code]\nmodel = "b"\n', '[tasks.code]\nmodell = "b"\n'):
        its.edit(wrong)
    its.path.unlink()
    its.bound.look()
    assert its.lists[2:] == []
    assert [getattr(one, "action", "") for one in caplog.records].count("tasks_unreadable") == 4
    its.edit('default_model = "b"\n[tasks.code]\nmodel = "a"\n[tasks.sql]\n')
    assert its.lists[2:] == [CODE], "another target is the default"


def test_a_default_that_goes_does_not_make_the_workers_of_every_target_read_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = Followed(tmp_path, 'default_model = "b"\n[tasks.code]\nmodel = "a"\n')
    its.edit("[tasks.code]\n")
    assert its.lists == [CODE, set()]
    assert its.bound.bindings.default_model == "b"
    actions = [getattr(one, "action", "") for one in caplog.records if one.levelno >= logging.WARNING]
    assert actions == ["default_model_gone", "nothing_to_read"]


def test_topics_that_come_are_read_and_one_is_gone_when_two_looks_lack_it(tmp_path: Path) -> None:
    its = Followed(tmp_path, "[tasks.code]\n")
    its.topics = [*TOPICS, "jobs.math"]
    its.bound.look()
    assert its.lists[1:] == [ALL | {"jobs.math"}]
    its.topics = TOPICS
    its.bound.look()
    its.topics = [*TOPICS, "jobs.math"]
    its.bound.look()
    its.topics = None
    its.bound.look()
    assert its.lists[2:] == [], "a broker that lags behind, and one that is away, take no topic away"
    its.topics = TOPICS
    its.bound.look()
    its.bound.look()
    assert its.lists[2:] == [ALL]


def test_a_worker_gets_its_new_list_before_the_new_bindings_hold(tmp_path: Path) -> None:
    seen = []
    its = Followed(tmp_path, "[tasks.sql]\n")
    its.bound._read_topics = lambda topics: seen.append((set(topics), its.bound.is_ours("sql")))
    its.edit('default_model = "a"\n[tasks.sql]\nmodel = "b"\n')
    assert seen == [(ALL - {"jobs.sql"}, True)]
    assert not its.bound.is_ours("sql")


def reading(folder: Path, text: str) -> tuple[Followed, Any]:
    its, made = Followed(folder, text, target="fake"), validation(FakeEngine())
    made.bound = its.bound
    return its, made


def test_a_delivery_of_a_task_of_another_target_is_neither_decoded_nor_refused(tmp_path: Path) -> None:
    its, made = reading(tmp_path, "[tasks.code]\n[tasks.sql]\n")
    assert isinstance(made.read(delivery("a", task="sql")), ReadyJob)
    its.edit(BOUND)
    assert made.read(delivery("a", task="sql")) is None
    assert made.read(delivery("", task="sql", value=b'{"body": {"prompt": "x", "model": "other"}}')) is None
    assert made.read(delivery("a", task="sql", value=b"no job")) is None, "also not refused"
    assert isinstance(made.read(delivery("a", task="code")), ReadyJob)


def test_an_unknown_task_is_refused_by_the_default_targets_workers_alone(tmp_path: Path) -> None:
    its, made = reading(tmp_path, BOUND)
    with pytest.raises(UnknownTask):
        made.read(delivery("a", task="new"))
    its.path.write_text(BOUND + '[tasks.new]\nmodel = "other"\n', encoding="utf-8")
    num_lists = len(its.lists)
    assert made.read(delivery("a", task="new")) is None, "the file was read again at once"
    assert its.lists[num_lists:] == [CODE], "and its topic is on its way"


def test_a_job_that_names_another_model_is_refused_with_the_target_of_its_task(tmp_path: Path) -> None:
    _, made = reading(tmp_path, BOUND)
    with pytest.raises(InvalidField, match="expected 'fake', the target of the task code, found another"):
        made.read(delivery("", value=b'{"body": {"prompt": "x", "model": "other"}}'))
    its = made.read(delivery("", value=b'{"body": {"prompt": "x", "model": "fake"}}'))
    assert isinstance(its, ReadyJob)


def test_the_settings_of_tasks_follow_and_a_task_that_is_gone_stays_known_for_its_waiting_jobs(tmp_path: Path) -> None:
    its, made = reading(tmp_path, "[tasks.code]\nweight = 2.0\n[tasks.sql]\n")
    assert made.tasks["code"].weight == 2.0
    its.edit("[tasks.code]\nweight = 3.0\n")
    assert (made.tasks["code"].weight, made.tasks.keys()) == (3.0, {"code", "sql"})
