"""How many connections a worker takes, and a worker behind a pooler in transaction mode."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.messages import Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.postgres import read_only
from tests.fixtures.worker import Client, SteppedEngine, changed, running_worker, until
from tests.integration.test_worker_flow import assert_counts_add_up
from tests.integration.test_worker_refusals import job

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

#: The pool's and the one for notices.
MOST_CONNECTIONS = 3


def num_connections(database: Database) -> int:
    """Those of this database but the asking one."""
    counted = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND application_name = 'alphaloop'"
    )
    return int(database.scalar(text(counted)))


def test_a_worker_takes_three_connections_at_most(worker_settings: Settings, database: Database) -> None:
    client, names = Client(worker_settings), [f"job-{number}" for number in range(200)]
    with running_worker(worker_settings, FakeEngine(num_slots=4)) as running:
        client.send("code", [job(name) for name in names])
        most = 0

        def is_done() -> bool:
            nonlocal most
            most = max(most, num_connections(database))
            return len(running.worker.recorder) == 0 and running.worker.feed.num_waiting == 0 and most > 1

        until(is_done, "everything was recorded")
        client.results(len(names))
        most = max(most, num_connections(database))
    assert most <= MOST_CONNECTIONS
    assert_counts_add_up(database, num_jobs=len(names))


def test_a_worker_behind_a_pooler_decodes_and_hears_of_cancellations(
    worker_settings: Settings, database: Database, pooler_url: SecretStr
) -> None:
    settings = changed(worker_settings, postgres={"url": pooler_url, "through_pooler": True})
    client, engine = Client(settings), SteppedEngine(num_slots=4)
    with running_worker(settings, engine) as running:
        client.send("code", [job("cancelled"), *(job(f"job-{number}") for number in range(20))], partition=0)
        engine.wait_at_round(lambda names: "cancelled" in names)
        # As another worker's reader of `control` would write it down.
        database.change(text("INSERT INTO cancellations (job_id) VALUES ('cancelled')"))
        until(lambda: bool(running.worker.leases.cancelled()), "the cancellation was found without a notice")
        engine.run_freely()
        results = {result.job_id: result.status for result in client.results(21)}
    assert results.pop("cancelled") is Status.CANCELLED
    assert set(results.values()) == {Status.SUCCEEDED}


def test_a_worker_goes_on_when_a_server_that_was_read_only_for_a_moment_takes_writes_again(
    worker_settings: Settings, postgres_server: str, database_url: SecretStr, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sessions ended, the new ones may write nothing, and nothing ends these when writes are allowed again."""
    client, engine = Client(worker_settings), SteppedEngine(num_slots=4)
    names = [f"job-{number}" for number in range(20)]
    with running_worker(worker_settings, engine):
        client.send("code", [job(name) for name in names])
        engine.wait_at_round(lambda running: len(running) == 4)
        with read_only(postgres_server, database_url):
            engine.run_freely()
            until(lambda: caplog.text.count("25006") > 1, "the worker has been refused twice")
        results = client.results(len(names))
    assert sorted(result.job_id for result in results) == sorted(names)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    with Database(database_url) as database:
        assert_counts_add_up(database, num_jobs=len(names))
