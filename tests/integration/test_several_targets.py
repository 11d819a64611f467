"""Two targets in one group, as whole workers: tasks are bound there and back under load, and no job is lost."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from alphaloop.cli.status import told_of_waiting
from alphaloop.explaining.explanation import next_jobs
from alphaloop.kafka.topics import RESULTS, ensure_topics
from alphaloop.messages import Result, Status
from alphaloop.outcomes.reading import find_jobs
from alphaloop.settings import Settings, TasksFile, load_settings
from alphaloop.store.database import Database
from alphaloop.store.task_figures import TaskFigures, with_targets
from alphaloop.store.workers import WorkerStore
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, RunningWorker, SteppedEngine, by_key, changed, running_worker, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.postgres]

TASKS = tuple(f"task-{number}" for number in range(15))


class Installation:
    """A task list that the test edits, and the settings of every process."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.folder, self._settings = folder, changed(settings, kafka={"num_partitions": 2, "retry_delays_s": (1,)})
        self.bound: Mapping[str, str] = {}
        self.bind({})

    def bind(self, models: Mapping[str, str]) -> None:
        """Bind these tasks; `a` is the default."""
        self.bound = models
        lines = ['default_model = "a"']
        for task in TASKS:
            lines += [f"[tasks.{task}]", *([f'model = "{models[task]}"'] if task in models else [])]
        edited = self.folder / "edited"
        edited.write_text("\n".join(lines), encoding="utf-8")
        edited.replace(self.folder / "tasks.toml")

    @property
    def settings(self) -> Settings:
        read = load_settings(self.folder)
        return self._settings.model_copy(update={"tasks": read.tasks, "default_model": read.default_model})

    @contextmanager
    def worker(self, target: str, engine: FakeEngine | None = None) -> Iterator[RunningWorker]:
        engine = engine or FakeEngine(num_slots=4, num_words=(2, 6))
        engine.identity = replace(engine.identity, target=target, target_revision=f"{target}-1")
        with running_worker(self.settings, engine, tasks_file=TasksFile(self.folder)) as made:
            worker = made.worker
            worker.presence.enter(num_slots=4)
            yield made

    def wait_until_followed(self, workers: Sequence[RunningWorker]) -> None:
        """Until each worker reads the topics of its target's tasks, and has no partition of another one."""

        def follows(made: RunningWorker) -> bool:
            intake, target = made.worker.intake, made.worker.engine.identity.target
            tasks = {task for task in TASKS if self.bound.get(task, "a") == target}
            listed = {topic.split(".")[1] for topic in intake.listed} & {*TASKS}
            held = {one.topic.split(".")[1] for one in list(intake._partitions)} & {*TASKS}
            return listed == tasks and held <= tasks

        until(lambda: all(map(follows, workers)), "the workers follow the task list")


@pytest.fixture
def installation(worker_settings: Settings, tmp_path: Path) -> Installation:
    """Fifteen tasks, all of target `a`."""
    return Installation(worker_settings, tmp_path)


def job(name: str) -> bytes:
    return json.dumps({"job_id": name, "prompt": f"write about {name}", "max_tokens": 6}).encode()


def task_of(name: str) -> str:
    return name.rsplit("_", 1)[0]


def results_of(client: Client, names: set[str]) -> dict[str, Result]:
    """The result of each job; each was answered with one outcome, however often."""
    found = by_key(client.read([RESULTS], lambda records: names <= by_key(records).keys()))
    assert {name: len(set(found[name])) for name in names} == dict.fromkeys(names, 1), "one outcome a job"
    return {name: Result.decode(found[name][0]) for name in names}


class Load:
    """Jobs of all tasks, sent until `end`."""

    def __init__(self, client: Client) -> None:
        self.names: set[str] = set()
        self._client, self._is_over = client, threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(0.3):
            for task in TASKS:
                name = f"{task}_{number}"
                self._client.send(task, [job(name)])
                self.names.add(name)
            number += 1

    def end(self) -> set[str]:
        self._is_over.set()
        self._thread.join()
        return self.names


def test_tasks_that_are_bound_there_and_back_under_load_lose_no_job(
    installation: Installation, database: Database
) -> None:
    client, rng = Client(installation.settings), random.Random(33)
    targets: dict[str, set[str]] = defaultdict(lambda: {"a"})
    with installation.worker("a") as one, installation.worker("a") as another, installation.worker("b") as other:
        workers = one, another, other
        load = Load(client)
        try:
            for _ in range(6):
                bound = dict.fromkeys(rng.sample(TASKS, 5), "b")
                for task in bound:
                    targets[task].add("b")
                installation.bind(bound)
                installation.wait_until_followed(workers)
        finally:
            names = load.end()
        last = {f"{task}_last" for task in TASKS}
        for name in last:
            client.send(task_of(name), [job(name)])
        results = results_of(client, names | last)
    assert {one.status for one in results.values()} == {Status.SUCCEEDED}
    for name, result in results.items():
        assert result.target in targets[task_of(name)], "decoded by a target to which its task was never bound"
        assert result.target_revision == f"{result.target}-1"
    now = {name: installation.bound.get(task_of(name), "a") for name in last}
    assert {name: results[name].target for name in last} == now
    assert {one.target for one in results.values()} == {"a", "b"}


def test_a_job_that_runs_ends_where_it_runs_and_what_waits_behind_it_goes_to_the_new_target(
    installation: Installation,
) -> None:
    client, engine = Client(installation.settings), SteppedEngine(num_slots=1)
    names = [f"task-3_{number}" for number in range(6)]
    client.send("task-3", [job(name) for name in names], partition=0)
    with installation.worker("a", engine) as one, installation.worker("b") as other:
        (running,) = engine.wait_at_round()
        installation.bind({"task-3": "b"})
        until(lambda: "jobs.task-3" not in one.worker.intake.listed, "the list was followed")
        engine.run_freely()
        installation.wait_until_followed((one, other))
        results = results_of(client, set(names))
    assert {name for name, its in results.items() if its.target == "a"} == {running}
    assert {its.attempt for name, its in results.items() if name != running} <= {1, 2}


def test_an_unknown_task_is_answered_by_the_default_target(installation: Installation) -> None:
    client = Client(installation.settings)
    installation.bind({"task-0": "b"})
    ensure_topics(installation.settings.kafka, ["nobody"])
    with installation.worker("b") as other:
        client.send("nobody", [job("nobody_0")])
        client.send("task-0", [job("task-0_0")])
        results_of(client, {"task-0_0"})
        assert "jobs.nobody" not in other.worker.intake.listed, "it waits for a worker of the default target"
        with installation.worker("a"):
            (refused,) = client.refusals(1)
    error = Result.decode(refused.value or b"").error
    assert error is not None
    assert error.code == "unknown_task"


def test_a_target_without_a_worker_lets_its_jobs_wait_and_every_screen_says_why(
    installation: Installation, database: Database
) -> None:
    client = Client(installation.settings)
    installation.bind({"task-1": "b"})
    settings = installation.settings
    with ExitStack() as exits:
        exits.enter_context(installation.worker("a"))
        client.send("task-1", [job("task-1_0")])
        client.send("task-2", [job("task-2_0")])
        results_of(client, {"task-2_0"})
        (found,) = find_jobs(settings, database, ["task-1_0"])
        assert "waits in Kafka" in found.sentence()
        assert found.sentence().endswith("; no worker of b runs")
        seen = WorkerStore(database).seen()
        tasks = with_targets([TaskFigures("task-1"), TaskFigures("task-2")], settings.bindings, seen)
        assert [(one.target, one.not_served) for one in tasks] == [("b", "no worker of b runs"), ("a", None)]
        assert told_of_waiting(tasks, {"task-1": 1}) == ["no worker of b runs: the jobs of task-1 wait"]
        assert next_jobs(database, settings, tasks, seen[0].seen_at).keys() <= {"task-2"}
        exits.enter_context(installation.worker("b"))
        results = results_of(client, {"task-1_0"})
        assert (results["task-1_0"].target, results["task-1_0"].attempt) == ("b", 1)
        (found,) = find_jobs(settings, database, ["task-1_0"])
        assert found.not_served is None


def test_a_rolling_restart_of_both_targets_under_load_loses_no_job(installation: Installation) -> None:
    client = Client(installation.settings)
    installation.bind(dict.fromkeys(TASKS[:7], "b"))
    stacks = [ExitStack() for _ in range(4)]
    with ExitStack() as exits:
        for stack, target in zip(stacks, "aabb", strict=True):
            exits.enter_context(stack)
            stack.enter_context(installation.worker(target))
        load = Load(client)
        try:
            for place, target in ((0, "a"), (2, "b"), (1, "a"), (3, "b")):
                num_before = len(load.names)
                stacks[place].close()
                stacks[place].enter_context(installation.worker(target))
                until(lambda num=num_before: len(load.names) > num, "jobs go on")  # type: ignore[misc]
        finally:
            names = load.end()
        results = results_of(client, names)
    assert {one.status for one in results.values()} == {Status.SUCCEEDED}
    for name, result in results.items():
        assert result.target == installation.bound.get(task_of(name), "a")
