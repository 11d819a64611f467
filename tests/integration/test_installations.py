"""Several installations in one Kafka, and one database with several: told apart by a prefix, and refused when mixed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from pydantic import SecretStr, ValidationError

from alphaloop.client import Client as PythonClient
from alphaloop.errors import ConfigError
from alphaloop.kafka.client import client_config
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import CONTROL, SHARED, WORKER_CLIENT, cluster_id, list_topics
from alphaloop.messages import Status
from alphaloop.settings import KafkaSettings, Settings, load_settings
from alphaloop.start_wait import check_installation
from alphaloop.store.coordination import InstallationStore
from alphaloop.store.database import Database
from scheduler.__main__ import main as scheduler
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.console import PASSWORD, console
from tests.fixtures.messages import batch_line
from tests.fixtures.postgres import count, fresh_database
from tests.fixtures.worker import WAIT_S, changed, read, running_worker, until
from tests.integration.test_worker_retries import UnluckyEngine, asking
from worker.__main__ import main as worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

PREFIX = "team-a."


def names(kafka: KafkaSettings) -> tuple[set[str], set[str]]:
    """The topics and the groups that the broker has, whoever made them."""
    admin = AdminClient(client_config(kafka))
    topics = set(admin.list_topics(timeout=WAIT_S).topics)
    groups = {one.group_id for one in admin.list_consumer_groups().result(WAIT_S).valid}
    return {name for name in topics if not name.startswith("__")}, groups


@pytest.fixture
def settings(worker_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a worker with a prefix and the group that all have by default; commands and processes read the same."""
    monkeypatch.setenv("ALPHALOOP_KAFKA__PREFIX", PREFIX)
    monkeypatch.setenv("ALPHALOOP_KAFKA__RETRY_DELAYS_S", "[1]")
    group = {"prefix": PREFIX, "group_id": KafkaSettings().group_id, "retry_delays_s": (1,)}
    return changed(worker_settings, kafka=group)


def test_with_a_prefix_nothing_makes_a_name_without_it(
    settings: Settings,
    stack_cli: Cli,
    database_url: SecretStr,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALPHALOOP_KAFKA__GROUP_ID", settings.kafka.group_id)
    topics_before, groups_before = names(settings.kafka)
    batch = tmp_path / "batch.jsonl"
    batch.write_text("".join(json.dumps(batch_line(f"line-{number}", "a prompt")) + "\n" for number in range(3)))
    with (
        closing(Producer(settings.kafka)) as producer,
        running_worker(settings, UnluckyEngine({"unlucky": 1})),
        PythonClient(settings) as client,
        console(database_url, kafka=settings.kafka, password=SecretStr(PASSWORD)) as visitor,
    ):
        sent = client.submit([{"task": "code", "prompt": "one"}, {"task": "code", "prompt": "two", "stream": True}])
        assert {one.status for one in client.results(sent, timeout_s=WAIT_S)} == {Status.SUCCEEDED}
        assert [*client.stream({"task": "code", "prompt": "three"}, timeout_s=WAIT_S)]
        for value in (asking("unlucky one", job_id="unlucky"), asking("hot", temperature=9.5)):
            producer.send("jobs.code", key=None, value=value)
        producer.send(CONTROL, key=None, value=b"no order")
        producer.flush(WAIT_S)
        for topic in ("jobs.code.dlq", f"{CONTROL}.dlq"):
            assert read(settings.kafka, [topic], bool)
        commands = (
            ("enqueue", "--task", "code", "--file", "-"),
            ("status", "--json"),
            ("job", "unlucky"),
            ("cancel", "unlucky"),
            ("dlq", "list"),
            ("dlq", "redrive", "--task", "code", "--set", "temperature=0.5"),
            ("batch", "submit", str(batch), "--task", "code"),
            ("batch", "status", str(batch)),
            ("topics", "create", "code", "--high", "--all"),
        )
        for command in commands:
            ran = stack_cli(*command, stdin=asking("typed") + b"\n")
            assert ran.code == 0, (command, ran.err)
        visitor.sign_in()
        assert visitor.upload(batch.read_bytes(), {"token": visitor.token("/batches"), "task": "chat"}).status == 303
        for page in ("/", "/batches", "/jobs"):
            assert visitor.get(page).status == 200
        until(lambda: all(row["waiting"] == 0 for row in stack_cli("status", "--json").json["tasks"]), "all is decoded")
    assert scheduler(["once"]) == 0
    topics, groups = names(settings.kafka)
    topics, groups = topics - topics_before, groups - groups_before
    assert {name for name in topics | groups if not name.startswith(PREFIX)} == set()
    expected = {*SHARED, f"{CONTROL}.dlq", *(f"jobs.code{end}" for end in ("", ".high", ".retry.1s", ".dlq"))}
    assert {PREFIX + name for name in expected} <= topics
    assert {f"{PREFIX}alphaloop-workers", f"{PREFIX}alphaloop-workers-control"} <= groups
    listed = {one["name"] for one in stack_cli("topics", "list", "--json").json}
    assert listed == topics, "the command shows the cluster's names"
    without = settings.kafka.model_copy(update={"prefix": ""})
    assert set(list_topics(without)) >= topics
    assert expected <= set(list_topics(settings.kafka))


def test_two_prefixes_share_a_cluster_and_each_decodes_its_own_jobs(
    worker_settings: Settings, postgres_server: str, migrated_template: str
) -> None:
    group = {"group_id": KafkaSettings().group_id}
    with fresh_database(postgres_server, migrated_template) as other_url:
        a = changed(worker_settings, kafka={**group, "prefix": "a."})
        b = changed(worker_settings, kafka={**group, "prefix": "b."}, postgres={"url": other_url})
        with running_worker(a, FakeEngine(num_slots=4)), running_worker(b, FakeEngine(num_slots=4)):
            for one in (a, b):
                with PythonClient(one) as client:
                    batch = client.submit([{"task": "code", "prompt": str(number)} for number in range(20)])
                    assert len([*client.results(batch, timeout_s=WAIT_S)]) == 20
        for url in (a.postgres.url, b.postgres.url):
            assert url is not None
            with Database(url) as database:
                assert count(database, "jobs") == 20


def test_a_prefix_that_others_would_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("jobs.", "a b", "ä.", "x" * 101):
        with pytest.raises(ValidationError):
            KafkaSettings(prefix=wrong)
    monkeypatch.setenv("ALPHALOOP_KAFKA__PREFIX", "jobs.")
    with pytest.raises(ConfigError, match="begin with jobs"):
        load_settings()


@pytest.mark.parametrize("noted", [("another-cluster", ""), (None, "other.")])
def test_a_database_of_another_kafka_is_refused_with_both_until_it_is_adopted(
    worker_settings: Settings,
    stack_cli: Cli,
    database: Database,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    noted: tuple[str | None, str],
) -> None:
    here = cluster_id(worker_settings.kafka)
    store = InstallationStore(database)
    store.adopt(noted[0] or here, noted[1])
    for process in (lambda: worker([]), lambda: scheduler(["once"]), lambda: scheduler(["run"])):
        capsys.readouterr()
        assert process() == 1
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "belongs to the Kafka cluster" in line]
        assert f"the Kafka cluster {noted[0] or here}" in said
        assert noted[1] in said
        assert f"found the cluster {here}" in said
        assert f"alphaloop migrate --adopt-cluster {here}" in said
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps(batch_line("line", "a prompt")))
    for command in (
        ("batch", "submit", str(batch), "--task", "code"),
        ("batch", "cancel", str(batch)),
        ("cancel", "one"),
        ("dlq", "redrive", "--task", "code"),
        ("dlq", "purge", "--task", "code", "--before", "1d"),
    ):
        refused = stack_cli(*command)
        assert (refused.code, f"alphaloop migrate --adopt-cluster {here}" in refused.err) == (1, True), command
    assert count(database, "cancellations") == count(database, "batches") == 0
    ran = stack_cli("migrate", "--adopt-cluster", here)
    assert (ran.code, f"now belongs to the Kafka cluster {here}" in ran.err) == (0, True)
    assert "belongs already" in stack_cli("migrate", "--adopt-cluster", here).err
    assert scheduler(["once"]) == 0


@pytest.mark.roles("alphaloop_worker", "alphaloop_scheduler")
def test_the_first_process_notes_the_kafka_whichever_it_is(database: Database) -> None:
    store = InstallationStore(database)
    own = store.belong("one", "")
    assert store.belong("one", "") == own
    for cluster, prefix in (("two", ""), ("one", "a.")):
        with pytest.raises(ConfigError, match="belongs to the Kafka cluster one"):
            store.belong(cluster, prefix)


def test_a_group_with_workers_of_another_database_is_refused(
    worker_settings: Settings,
    stack_cli: Cli,
    postgres_server: str,
    migrated_template: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = worker_settings.kafka
    with (
        fresh_database(postgres_server, migrated_template) as other_url,
        Database(other_url) as other,
    ):
        InstallationStore(other).adopt(cluster_id(kafka), "")  # until then a copy has the id of its template
        with running_worker(worker_settings, FakeEngine(num_slots=4)) as running:
            until(lambda: running.worker.intake.is_assigned, "the first installation's worker is in the group")
            # One that came in at the same moment is seen by those that run.
            intruder = Consumer(kafka, group_id=kafka.group_id, client_id=f"{WORKER_CLIENT}an-intruder")
            with closing(intruder):
                intruder.subscribe(["jobs.sql"], **{f"on_{name}": print for name in ("assign", "revoke", "lost")})

                def is_told() -> bool:
                    intruder.poll(0.1)
                    mixed = [one for one in caplog.records if getattr(one, "action", "") == "installations_mixed"]
                    return any("an-intruder" in one.getMessage() for one in mixed)

                until(is_told, "the running worker says that another's is in its group")
            with monkeypatch.context() as patched:
                patched.setenv("DATABASE_URL", other_url.get_secret_value())
                for process in (lambda: worker([]), lambda: scheduler(["run"])):
                    capsys.readouterr()
                    assert process() == 1
                    said = capsys.readouterr().err
                    assert f"are in the group {kafka.group_id}" in said
                    assert "kafka.prefix" in said
        until(lambda: not is_refused(kafka, other), "the group is empty, and free")


def is_refused(kafka: KafkaSettings, database: Database) -> bool:
    """Whether a process of this database would be refused now."""
    try:
        check_installation(kafka, database)
    except ConfigError:
        return True
    return False
