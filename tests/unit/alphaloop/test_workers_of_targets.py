"""What workers of one target can do, and which tasks nobody takes because their target has no worker."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.cli.status import told_of, told_of_waiting
from alphaloop.outcomes.reading import JobPlace, Whereabouts
from alphaloop.probe_plan import DueProbe, drafted
from alphaloop.settings import Bindings, TaskSettings
from alphaloop.store.task_figures import TaskFigures, with_targets
from alphaloop.store.workers import (
    Capabilities,
    SeenWorker,
    WorkerLoad,
    WorkerSetup,
    drafters_of,
    not_served,
    running,
    targets_by_revision,
)
from tests.fixtures.deciding import SETUP

ALL = Capabilities(8192, 1 << 20, ("min_p", "n", "top_k"), ("/content", "s3://b/c"))
BOUND = Bindings({"code": TaskSettings(), "sql": TaskSettings(model="b")}, "a")


def seen(target: str, *, silent_s: float = 0.0, revision: str = "1") -> SeenWorker:
    setup = replace(SETUP, facts=replace(SETUP.facts, target_revision=revision))
    load = WorkerLoad(f"worker-{target}{revision}", "a device", target, 4, 0, 0, {}, setup=setup)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return SeenWorker(load, now, now, timedelta(seconds=silent_s))


@pytest.mark.parametrize(
    ("can", "told"),
    [
        (ALL, None),
        (replace(ALL, context_length=9000, max_job_bytes=2 << 20, content=(*ALL.content, "/more")), None),
        (replace(ALL, context_length=4096), "4,096 tokens of context and not 8,192"),
        (replace(ALL, max_job_bytes=1024), "1,024 bytes of a job and not 1,048,576"),
        (replace(ALL, fields=("n", "tools")), "not the fields body.min_p, body.top_k"),
        (replace(ALL, content=("/content",)), "no prompts from s3://b/c"),
        (Capabilities(1, 1 << 20, ALL.fields), "1 tokens of context and not 8,192; no prompts from /content, s3://b/c"),
    ],
)
def test_what_a_worker_can_not_that_another_can(can: Capabilities, told: str | None) -> None:
    assert can.lack(ALL) == told


def test_a_setup_comes_back_from_the_database_as_it_was_said() -> None:
    for setup in (SETUP, replace(SETUP, default_model="a", can=replace(ALL, fields=("top_k",)))):
        assert WorkerSetup.read(json.loads(setup.as_json())) == setup


def test_a_setup_of_another_release_is_read_without_its_new_fields_or_not_at_all() -> None:
    content = json.loads(replace(SETUP, default_model="a", can=ALL, ended={"small": "gone"}).as_json())
    newer = {**content, "new": {"a": 1}, "can": {**content["can"], "new": 1}}
    newer["drafters"] = [{**drafter, "new": 1} for drafter in content["drafters"]]
    assert WorkerSetup.read(newer) == WorkerSetup.read(content) is not None
    for name in ("target_revision", "engine", "num_slots", "half_life", "drafters"):
        assert WorkerSetup.read({field: content[field] for field in content if field != name}) is None, name
    for name, value in (
        *(("half_life", "soon"), ("num_slots", None), ("drafters", {}), ("drafters", [1]), ("drafters", [{}])),
        *(("ended", ["small"]), ("default_model", 1), ("can", "all"), ("can", {"context_length": 1})),
        ("can", {**content["can"], "max_job_bytes": "many"}),
    ):
        assert WorkerSetup.read({**content, name: value}) is None, (name, value)


def test_a_task_is_served_while_a_worker_of_its_target_was_heard_of_lately() -> None:
    assert [not_served(BOUND, task, [seen("a")]) for task in ("code", "sql", "new")] == [
        *(None, "no worker of b runs", None)
    ]
    assert not_served(BOUND, "sql", [seen("a"), seen("b", silent_s=29)]) is None
    assert not_served(BOUND, "sql", [seen("a"), seen("b", silent_s=31)]) == "no worker of b runs"
    one_target = Bindings({}, None)
    assert not_served(one_target, "sql", []) == "no worker runs"
    assert not_served(one_target, "sql", [seen("b")]) is None


def test_a_probe_goes_only_where_the_workers_of_its_target_have_the_drafter() -> None:
    due = [DueProbe(task, drafter, 3, None) for task in ("code", "sql") for drafter in ("small", "other")]
    assert drafted(due, BOUND, [seen("a"), seen("b")]) == [due[0], due[2]]
    assert drafted(due, BOUND, [seen("a")]) == [due[0]], "a target without a worker is asked nothing"
    one_target = Bindings({}, None)
    assert drafted(due, one_target, [seen("a")]) == [due[0], due[2]], "the settings may name more than a worker has"
    assert drafted(due, one_target, [seen("a", silent_s=31)]) == []
    ended = seen("a")
    ended = replace(ended, load=replace(ended.load, setup=replace(SETUP, ended={"small": "any job"})))
    assert drafted(due, one_target, [ended]) == [], "it would decode the probe vanilla"
    assert drafted(due, one_target, [ended, seen("a")]) == [due[0], due[2]]


def test_screens_name_targets_only_where_there_are_several() -> None:
    figures = [TaskFigures("code"), TaskFigures("sql")]
    assert {one.target for one in with_targets(figures, Bindings({}, "a"), [])} == {None}
    told = with_targets(figures, BOUND, [seen("a")])
    assert [(one.target, one.not_served) for one in told] == [("a", None), ("b", "no worker of b runs")]
    assert told[1].as_json({})["target"] == "b"
    assert told_of_waiting(told, {"code": 5, "sql": 2}) == ["no worker of b runs: the jobs of sql wait"]
    assert told_of_waiting(told, {"code": 5}) == [], "nothing waits"


def test_a_job_that_waits_for_its_target_says_so() -> None:
    waits = Whereabouts("x", JobPlace.WAITING, not_served="no worker of b runs")
    assert waits.sentence() == "waits in Kafka: a worker gave it back; no worker of b runs"
    assert waits.as_json()["not_served"] == "no worker of b runs"


def test_revisions_are_counted_for_each_target() -> None:
    workers = [seen("a"), seen("b", revision="2")]
    assert told_of(workers) == [], "two targets are no two revisions"
    assert told_of([*workers, seen("b", revision="3")]) == ["workers serve 2 revisions of b: 2 (1), 3 (1)"]
    assert targets_by_revision(workers) == {"1": "a", "2": "b"}
    assert drafters_of(workers, "a") == {"lookup", "small"}
    assert drafters_of([seen("a", silent_s=31)], "a") == frozenset()
    found = running(workers, "b")
    assert found is not None
    assert (found.setup.facts.target_revision, found.num_workers, found.num_others) == ("2", 1, 0)
    assert running(workers, "c") is None
