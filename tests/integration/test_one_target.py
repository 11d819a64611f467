"""All workers serve one target: a worker of another one ends at its start, and a result names the model it is from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result, Status
from alphaloop.settings import Settings
from alphaloop.start_wait import StartWait
from alphaloop.store.database import Database
from alphaloop.store.workers import WorkerLoad, WorkerStore
from tests.fakes import FakeEngine
from tests.fixtures.deciding import SETUP
from tests.fixtures.worker import Client, RunningWorker, until
from worker import __main__ as worker_main
from worker.__main__ import ProcessHealth

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

OTHER = WorkerLoad("worker-of-before", "a device", "model-a", 4, 0, 0, {}, setup=SETUP)


@pytest.fixture
def assembled(worker_settings: Settings) -> Iterator[RunningWorker]:
    """A worker that is put together and consumes nothing yet."""
    worker = RunningWorker(worker_settings, FakeEngine(), seed=1)
    yield worker
    worker.close()


def consume(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process does once everything is loaded."""
    monkeypatch.setattr(worker_main, "set_up_interpreter", lambda: None)
    health = ProcessHealth(StartWait(threading.Event(), 1.0))
    worker_main._consume(worker.worker, health, metrics_url="")


def test_a_worker_of_another_target_ends_before_it_loads_a_model(
    here: Any, database: Database, database_url: SecretStr, kafka_broker: str
) -> None:
    WorkerStore(database).say(OTHER)
    servers = {"KAFKA_BOOTSTRAP_SERVERS": kafka_broker, "DATABASE_URL": database_url.get_secret_value()}
    target = {"ALPHALOOP_MODELS__TARGET__NAME": "model-b", "ALPHALOOP_MODELS__TARGET__SOURCE": "/nowhere"}
    code, told = here("worker", servers, **target)
    assert code == 1
    for part in ("model-a", "model-b", "worker-of-before", "models.target.name", "default_model"):
        assert part in str(told)
    assert "/nowhere" not in str(told)
    assert [one.load.owner for one in WorkerStore(database).seen()] == ["worker-of-before"]


def test_a_worker_that_another_target_came_before_while_it_loaded_takes_no_job(
    assembled: RunningWorker, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(assembled.settings)
    client.send("code", [b'{"job_id": "waits", "prompt": "x"}'])
    WorkerStore(database).say(OTHER)
    with pytest.raises(ConfigError, match="model-a"):
        consume(assembled, monkeypatch)
    assert [one.load.owner for one in WorkerStore(database).seen()] == ["worker-of-before"]
    assert client.read([RESULTS], lambda records: True) == []


def test_another_revision_starts_and_the_result_names_target_and_revision(
    assembled: RunningWorker, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity = FakeEngine().identity
    facts = replace(SETUP.facts, target_revision="of before")
    WorkerStore(database).say(replace(OTHER, target=identity.target, setup=replace(SETUP, facts=facts)))
    thread = threading.Thread(target=consume, args=(assembled, monkeypatch))
    thread.start()
    try:
        client = Client(assembled.settings)
        client.send("code", [b'{"job_id": "a", "prompt": "x", "max_tokens": 2}'])
        (record,) = client.read([RESULTS], lambda records: bool(records))
        result = Result.decode(record.value or b"")
        assert (result.status, result.target, result.target_revision) == (
            Status.SUCCEEDED,
            identity.target,
            identity.target_revision,
        )
        owner = assembled.owner
        until(lambda: len(WorkerStore(database).seen()) == 2, "it says what it runs")
        (own,) = [one for one in WorkerStore(database).seen() if one.load.owner == owner]
        assert own.load.setup.facts.target_revision == identity.target_revision
        assert own.load.setup.drafters == tuple(assembled.worker.engine.drafters)
    finally:
        assembled.stop.set()
        thread.join(60)
    assert any(getattr(record, "action", "") == "other_revision" for record in caplog.records)
    assert [one.load.owner for one in WorkerStore(database).seen()] == ["worker-of-before"], "it has left"
