"""Topics come when they are first used: few before anything happens, those of a task's failures together."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from alphaloop.kafka.topics import CONTROL, RESULTS, SHARED, ensure_topic, ensure_topics, list_topics
from alphaloop.messages import Status
from alphaloop.settings import KafkaSettings, Settings, load_settings
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.worker import ROOT, Client, RunningWorker, changed, read, running_worker, until
from tests.integration.test_worker_retries import UnluckyEngine, asking

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

OF_FAILURES = {"jobs.code.retry.1s", "jobs.code.retry.2s", "jobs.code.retry.3s", "jobs.code.dlq"}


@pytest.fixture
def settings(worker_settings: Settings) -> Settings:
    """A worker's, who tries failed jobs again three times."""
    return changed(worker_settings, kafka={"retry_delays_s": (1, 2, 3)})


def topics(kafka: KafkaSettings) -> set[str]:
    return {name for name in list_topics(kafka) if not name.startswith("__")}


def assigned(running: RunningWorker) -> set[str]:
    return {partition.topic for partition in running.worker.intake._partitions}


def test_a_new_installation_has_a_topic_for_each_task_and_four_others(settings: Settings) -> None:
    shipped = settings.model_copy(update={"tasks": load_settings(ROOT / "configs").tasks})
    expected = {*SHARED, *(f"jobs.{task}" for task in shipped.tasks)}
    assert (len(shipped.tasks), len(expected)) == (15, 19)
    with running_worker(shipped, FakeEngine(num_slots=4)):
        client = Client(shipped)
        client.send("code", [asking("one", job_id="one")])
        (result,) = client.results(1)
    assert result.status is Status.SUCCEEDED
    assert topics(settings.kafka) == expected


def test_a_worker_creates_the_high_topic_of_a_task_that_asks_for_it(settings: Settings) -> None:
    tasks = {**settings.tasks, "code": settings.tasks["code"].model_copy(update={"high_topic": True})}
    with running_worker(settings.model_copy(update={"tasks": tasks}), FakeEngine(num_slots=4)):
        assert {name for name in topics(settings.kafka) if name.endswith(".high")} == {"jobs.code.high"}


def test_the_first_failure_creates_all_topics_of_failures_at_once_and_is_tried_again(settings: Settings) -> None:
    """One rebalance, in which the worker gets the partitions of all three retry topics."""
    client = Client(settings)
    with running_worker(settings, UnluckyEngine({"unlucky": 2})) as running:
        intake = running.worker.intake
        until(lambda: assigned(running) == {f"jobs.{task}" for task in settings.tasks}, "every task is assigned")
        before, num_before = topics(settings.kafka), intake.assignment_number
        client.send("code", [asking("unlucky one", job_id="unlucky")])
        (result,) = client.results(1)
        assert topics(settings.kafka) - before == OF_FAILURES
        assert assigned(running) >= OF_FAILURES - {"jobs.code.dlq"}, "read without a restart"
        assert intake.assignment_number == num_before + 1
    assert result.status is Status.SUCCEEDED


def test_a_refused_message_is_a_failure_of_its_task_if_there_is_such_a_task(settings: Settings) -> None:
    client = Client(settings)
    ensure_topics(settings.kafka, ["nobody-knows"])
    until(lambda: topics(settings.kafka) >= {"jobs.nobody-knows", *SHARED}, "the broker names them")
    before = topics(settings.kafka)
    with running_worker(settings, FakeEngine(num_slots=4)):
        client.send("nobody-knows", [b'{"prompt": "x"}'])
        client.read(["jobs.nobody-knows.dlq"], bool)
        assert topics(settings.kafka) - before == {"jobs.nobody-knows.dlq"}, "a foreign name becomes no retry topics"
        client.send("code", [b"no job"])
        client.read(["jobs.code.dlq"], bool)
        assert topics(settings.kafka) - before == {"jobs.nobody-knows.dlq", *OF_FAILURES}
        client.send_to(CONTROL, b"no order")
        client.read([f"{CONTROL}.dlq"], bool)
    assert topics(settings.kafka) - before == {"jobs.nobody-knows.dlq", f"{CONTROL}.dlq", *OF_FAILURES}


def test_workers_that_create_the_same_topics_at_once_all_go_on(settings: Settings) -> None:
    kafka = settings.kafka
    with ThreadPoolExecutor(4) as together:
        list(together.map(lambda _: ensure_topics(kafka, settings.tasks), range(4)))
        ensure = partial(ensure_topic, kafka, "jobs.code.dlq")
        list(together.map(lambda _: ensure(["code"]), range(4)))
    expected = {*SHARED, *(f"jobs.{task}" for task in settings.tasks), *OF_FAILURES}
    until(lambda: topics(kafka) == expected, "the broker names them all")


@pytest.fixture
def topics_cli(stack_cli: Cli, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line with the worker's settings, in a narrow window."""
    monkeypatch.setenv("ALPHALOOP_KAFKA__RETRY_DELAYS_S", "[1, 2, 3]")
    monkeypatch.setenv("COLUMNS", "80")
    return stack_cli


def test_the_command_creates_everything_beforehand_and_a_worker_then_creates_nothing(
    topics_cli: Cli, settings: Settings
) -> None:
    create = "topics", "create", "--all", "--high"
    lines = topics_cli(*create, "--dry-run").out.splitlines()
    assert topics(settings.kafka) == set()
    (retry,) = [line for line in lines if " jobs.code.retry.2s " in line]
    assert "--create --if-not-exists" in retry
    assert "--partitions 1 --replication-factor 1" in retry
    assert "--config retention.ms=604800000" in retry
    created = topics_cli(*create).out.split()
    assert len(created) == len(lines) == len(settings.tasks) * 6 + 5
    until(lambda: topics(settings.kafka) == set(created), "the broker names them")
    assert "no topic is missing" in topics_cli(*create).err
    client = Client(settings)
    with running_worker(settings, UnluckyEngine({"unlucky": 1})):
        client.send("code", [asking("unlucky one", job_id="unlucky"), b"no job"])
        client.read(["jobs.code.dlq"], bool)
        client.results(1)
    assert topics(settings.kafka) == set(created)


def test_the_list_shows_what_the_broker_has(topics_cli: Cli, settings: Settings) -> None:
    assert "no topics" in topics_cli("topics", "list").err
    assert topics_cli("topics", "create", "code", "--high").out.split() == ["jobs.code", "jobs.code.high", *SHARED]
    until(lambda: topics(settings.kafka) == {"jobs.code", "jobs.code.high", *SHARED}, "the broker names them")
    ran = topics_cli("topics", "list")
    header, *rows = ran.out.splitlines()
    assert header.split() == ["topic", "partitions", "replicas", "kept", "for", "message", "bytes"]
    assert [row.split()[0] for row in rows] == sorted(["jobs.code", "jobs.code.high", *SHARED])
    assert max(map(len, ran.out.splitlines())) <= 80
    (one,) = [one for one in topics_cli("topics", "list", "--json").json if one["name"] == RESULTS]
    assert one["num_partitions"] == int(rows[-2].split()[1])
    assert one["retention_ms"] == 7 * 86_400_000
    assert one["max_message_bytes"] == settings.kafka.max_message_bytes


def test_a_command_about_an_unknown_task_creates_nothing(topics_cli: Cli, settings: Settings) -> None:
    ran = topics_cli("topics", "create", "cod")
    assert (ran.code, "no task 'cod'" in ran.err, "expected one of" in ran.err) == (1, True, True)
    assert topics(settings.kafka) == set()


def test_jobs_for_a_high_topic_that_is_missing_are_wrong_lines_and_the_others_are_sent(
    topics_cli: Cli, settings: Settings
) -> None:
    topics_cli("topics", "create", "sql", "--high")
    lines = b"".join(json.dumps({"task": task, "prompt": "x"}).encode() + b"\n" for task in ("code", "sql"))
    ran = topics_cli("enqueue", "--file", "-", "--high", stdin=lines)
    assert ran.code == 1
    assert "there is no topic jobs.code.high (`alphaloop topics create code --high` creates it)" in ran.err
    assert len(read(settings.kafka, ["jobs.sql.high"], bool)) == 1
    assert "jobs.code.high" not in topics(settings.kafka)
