"""Topics that a worker may not create or write to: it goes on with everything else, and by itself once it may."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from alphaloop.client import Client as PythonClient
from alphaloop.client import ResultsMissing
from alphaloop.errors import BrokerError, BrokerLoginRefused
from alphaloop.kafka.backlog import unfinished
from alphaloop.kafka.topics import (
    CONTROL,
    RESULTS,
    TOKENS,
    delete_before,
    ensure_topic,
    ensure_topics,
    list_topics,
    longest_job_retention,
)
from alphaloop.messages import Status
from alphaloop.settings import Settings, load_settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.broker import Operator, settings_for, with_listener
from tests.fixtures.runs import num_pending
from tests.fixtures.worker import Client, RunningWorker, changed, headers_of, running_worker, until
from tests.integration.test_worker_retries import UnluckyEngine, asking
from worker import dead_letters

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

ALICE, BOB, CAROL, PASSWORD = "alice", "bob", "carol", "correct-horse"
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "deploy.md"
CODE_DLQ = "jobs.code.dlq"


@pytest.fixture(scope="module")
def guarded(kafka_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A broker with access rights: its address for the operator, and its address for alice."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    properties = {
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": " ".join(
            [login, *(f'user_{name}="{PASSWORD}"' for name in (ALICE, BOB, CAROL))]
        )
        + ";",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with with_listener(kafka_home, tmp_path_factory.mktemp("guarded"), "SASL_PLAINTEXT", properties) as addresses:
        operator = Operator(addresses[0])
        operator.allow_everything(ALICE)
        operator.deny_creating(ALICE)
        yield addresses


@pytest.fixture
def operator(guarded: tuple[str, str]) -> Operator:
    """Somebody who may do everything, on a broker that has only the topics that the test makes."""
    one = Operator(guarded[0])
    for topic in list_topics(settings_for(guarded[0])):
        if not topic.startswith("__"):
            one.delete(topic)
    return one


@pytest.fixture
def settings(guarded: tuple[str, str], database_url: SecretStr) -> Settings:
    """A worker's, who is alice and may create no topic."""
    kafka = settings_for(guarded[1]).model_copy(
        update={
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_username": ALICE,
            "sasl_password": SecretStr(PASSWORD),
            "extra": {"topic.metadata.propagation.max.ms": 1000},
        }
    )
    loaded = load_settings(profile="local", overrides={"postgres": {"url": database_url}})
    return loaded.model_copy(update={"kafka": kafka, "tasks": {name: loaded.tasks[name] for name in ("code", "sql")}})


@pytest.fixture
def client(guarded: tuple[str, str], operator: Operator) -> Client:
    """A sender who is the operator. Topics of jobs are made, dead-letter topics of jobs are not."""
    one = Client(Settings(kafka=settings_for(guarded[0])))
    for topic in ("jobs.code", "jobs.sql"):
        operator.create(topic)
    return one


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short time between two tries to reach a topic."""
    monkeypatch.setattr(dead_letters, "RETRY_S", 0.5)
    monkeypatch.setattr("worker.background.LONGEST_WAIT_S", 0.5)


def test_the_python_client_says_that_its_password_is_wrong(settings: Settings, operator: Operator) -> None:
    wrong = settings.kafka.model_copy(update={"sasl_password": SecretStr("wrong")})
    with PythonClient(wrong) as sender, pytest.raises(BrokerLoginRefused, match=r"127\.0\.0\.1"):
        sender.submit({"task": "code", "prompt": "p"})


def test_the_python_client_needs_the_topics_that_it_uses_and_no_others(
    guarded: tuple[str, str], settings: Settings, operator: Operator
) -> None:
    """Carol may send jobs of one task and read results. All other topics she cannot even see."""
    for topic in ("jobs.code", "results"):
        operator.create(topic)
    operator.allow(CAROL, "--topic jobs.code --operation Describe --operation Write")
    operator.allow(CAROL, "--topic results --operation Describe --operation Read")
    operator.allow(CAROL, "--group alphaloop-reader- --operation Read --resource-pattern-type prefixed")
    kafka = settings.kafka.model_copy(update={"sasl_username": CAROL})
    with PythonClient(settings.model_copy(update={"kafka": kafka})) as sender:
        batch = sender.submit({"task": "code", "prompt": "p"})
        with pytest.raises(ResultsMissing):
            list(sender.results(batch, timeout_s=1))
        with pytest.raises(BrokerError, match=CONTROL):
            sender.cancel(batch)


def job(name: str) -> bytes:
    return json.dumps({"job_id": name, "prompt": f"write about {name}", "max_tokens": 4}).encode()


def reason(worker: RunningWorker, topic: str) -> str:
    return worker.worker.forwarder.topics.reason(topic) or ""


def test_what_the_guide_allows_is_enough(settings: Settings, operator: Operator, guarded: tuple[str, str]) -> None:
    """Of a login with these rights and no others: topics are made; jobs end, are refused, tried again and cancelled."""
    for command in re.findall(r"^kafka-acls.sh \$K (.*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE):
        operator.allow(BOB, command)
    settings = changed(settings, kafka={"sasl_username": BOB, "retry_delays_s": (1,)})
    kafka = settings.kafka
    ensure_topics(kafka, settings.tasks)
    anyone = Client(Settings(kafka=settings_for(guarded[0])))
    with running_worker(settings, FakeEngine(num_slots=4, failing_steps=(0,))) as worker:
        anyone.send("code", [job("first"), b"no job"], partition=0)
        results = {result.job_id: result.status for result in anyone.results(1)}
        assert results == {"first": Status.SUCCEEDED}
        assert worker.worker.metrics.registry.get_sample_value(
            "alphaloop_jobs_retried_total", {"code": "decode_failed"}
        )
        (letter,) = anyone.read([CODE_DLQ], lambda letters: bool(letters))
        until(lambda: unfinished(kafka)["code"].num_messages == 0, "nothing is left")
        assert not worker.worker.forwarder.topics.reason(CODE_DLQ)
    longest_job_retention(kafka)
    delete_before(kafka, {letter.topic_partition: letter.offset + 1})


def test_a_missing_dead_letter_topic_ends_no_worker_and_holds_up_no_job(
    settings: Settings, client: Client, operator: Operator
) -> None:
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        client.send("code", [job("before"), b"no job", job("after")], partition=0)
        client.send("sql", [job("other")])
        assert {result.job_id for result in client.results(3)} == {"before", "after", "other"}
        until(lambda: "jobs.code.dlq" in reason(worker, CODE_DLQ), "the worker says which topic is missing")
        shown = worker.worker.metrics.registry.get_sample_value
        until(lambda: shown("alphaloop_topic_unavailable", {"topic": CODE_DLQ}) == 1.0, "the metric shows it")
        until(lambda: worker.worker.intake.num_in_flight == 1, "only the refused message is held")
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        until(lambda: bool(reason(worker, CODE_DLQ)), "the next worker reads the message again")
        operator.create(CODE_DLQ)
        (letter,) = client.read([CODE_DLQ], lambda letters: bool(letters))
        until(lambda: worker.worker.intake.num_in_flight == 0, "the message is finished")
        until(lambda: not reason(worker, CODE_DLQ), "the worker is ready again")
    assert letter.value == b"no job"
    assert headers_of(letter)["__dlq.errors.exception"] == "malformed_message"


def test_results_that_may_not_be_written_wait_and_dead_letters_go_on(
    settings: Settings, client: Client, operator: Operator, database: Database
) -> None:
    operator.create(CODE_DLQ)
    operator.deny_writing(ALICE, RESULTS)
    try:
        with running_worker(settings, FakeEngine(num_slots=4)) as worker:
            client.send("code", [job("good"), b"no job"])
            client.read([CODE_DLQ], lambda letters: bool(letters))
            until(lambda: "TOPIC_AUTHORIZATION_FAILED" in reason(worker, RESULTS), "the worker says what it may not")
            assert num_pending(database) == 1
            operator.undo_deny_writing(ALICE, RESULTS)
            (result,) = client.results(1)
            until(lambda: not reason(worker, RESULTS), "the worker is ready again")
    finally:
        operator.undo_deny_writing(ALICE, RESULTS)
    assert (result.job_id, result.status) == ("good", Status.SUCCEEDED)


def test_a_worker_starts_without_topics_that_it_may_not_create(
    settings: Settings, client: Client, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in (RESULTS, TOKENS, CONTROL):
        operator.delete(topic)
    with running_worker(settings, FakeEngine(num_slots=4)) as worker:
        (told,) = [record for record in caplog.records if getattr(record, "action", "") == "topics_missing"]
        assert CONTROL in told.message
        assert "ACLs" in told.hint  # type: ignore[attr-defined]
        client.send("code", [job("good")])
        until(lambda: RESULTS in reason(worker, RESULTS), "the worker says that results cannot be published")
        operator.create(RESULTS)
        (result,) = client.results(1)
    assert result.status is Status.SUCCEEDED


def test_where_no_retry_topic_may_be_created_a_job_fails_for_good_and_is_not_lost(
    settings: Settings, client: Client, guarded: tuple[str, str]
) -> None:
    """Once the topics are there, the letter is written and the next job is tried again, without a restart."""
    settings = changed(settings, kafka={"retry_delays_s": (1,)})
    anyone = settings_for(guarded[0]).model_copy(update={"retry_delays_s": (1,)})
    with running_worker(settings, UnluckyEngine({"bad": 99, "unlucky": 1})) as worker:
        client.send("code", [asking("bad one", job_id="bad")])
        (result,) = client.results(1)
        assert (result.status, result.attempt) == (Status.FAILED, 1)
        until(lambda: bool(reason(worker, CODE_DLQ)), "the worker says which topic is missing")
        assert worker.worker.intake.num_in_flight == 1, "its message is held until the letter is written"
        ensure_topic(anyone, CODE_DLQ, ["code"])
        client.read([CODE_DLQ], bool)
        until(lambda: worker.worker.intake.num_in_flight == 0, "the message is finished")
        client.send("code", [asking("unlucky one", job_id="unlucky")])
        statuses = {one.job_id: one.status for one in client.results(2)}
    assert statuses == {"bad": Status.FAILED, "unlucky": Status.SUCCEEDED}
