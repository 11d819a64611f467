"""What Postgres refuses for a while stops no worker, burns no try, and costs no job its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, text

from alphaloop.messages import Status
from alphaloop.settings import PostgresSettings, Settings
from alphaloop.settings.processes import SessionLimits
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from tests.chaos.proxy import Proxy
from tests.chaos.world import proxied
from tests.fakes import FakeEngine
from tests.fixtures.postgres import count
from tests.fixtures.worker import Client, SteppedEngine, changed, running_worker, until
from tests.integration.test_worker_continuous import job, started
from tests.integration.test_worker_flow import assert_counts_add_up

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

#: Disk full, too many connections, deadlock, serialization, lock timeout, read-only, cancelled, stopping, and others.
STATES = ("53100", "53300", "40P01", "40001", "55P03", "25006", "57014", "57P01", "55000", "58030")
#: Where each state is raised, one after the other: at the claim, at the ledger, at the outbox.
TABLES = ("jobs", "decode_runs", "outbox")
SUCCEEDED, CRASHED = "jobs WHERE status = 'succeeded'", "jobs WHERE num_crashes > 0"
FAULTS = """
CREATE SEQUENCE num_faults;
CREATE TABLE faults (of_table text, state text);
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE found text;
BEGIN
    SELECT state INTO found FROM faults WHERE of_table = TG_ARGV[0];
    IF found IS NOT NULL THEN
        PERFORM nextval('num_faults');  -- stays although the transaction is rolled back
        RAISE EXCEPTION 'a test' USING ERRCODE = found;
    END IF;
    RETURN NULL;
END $$;
"""


class Faults:
    """Makes every statement that writes a table fail, until told otherwise."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._run(FAULTS)
        for table in TABLES:
            self._run(
                f"CREATE TRIGGER refusing BEFORE INSERT OR UPDATE OR DELETE ON {table}"
                f" FOR EACH STATEMENT EXECUTE FUNCTION refuse('{table}')"
            )

    def refuse(self, table: str, state: str) -> int:
        """From now on, and no longer what was refused before; returns how often something was refused by then.

        In one transaction, because a job that came between two faults would meet none of them.
        """
        with self._database.begin() as connection:
            connection.execute(text("TRUNCATE faults"))  # waits for whoever reads them
            connection.execute(text(f"INSERT INTO faults VALUES ('{table}', '{state}')"))
            return _num_raised(connection)

    def clear(self) -> None:
        self._run("TRUNCATE faults")

    def num_raised(self) -> int:
        with self._database.begin() as connection:
            return _num_raised(connection)

    def _run(self, statement: str) -> None:
        with self._database.begin() as connection:
            connection.exec_driver_sql(statement)


def _num_raised(connection: Connection) -> int:
    raised = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM num_faults"
    return int(connection.execute(text(raised)).scalar_one())


def test_every_refusal_that_passes_is_waited_out_wherever_it_comes(
    worker_settings: Settings, database: Database
) -> None:
    client, faults = Client(worker_settings), Faults(database)
    with running_worker(worker_settings, FakeEngine(num_slots=4)) as running:
        for number, state in enumerate(STATES):
            for table in TABLES:
                raised = faults.refuse(table, state)
                if table == TABLES[0]:
                    client.send("code", [job(state)])
                until(lambda before=raised: faults.num_raised() > before, f"{state} was raised at {table}")  # type: ignore[misc]
            faults.clear()
            until(lambda wanted=number + 1: count(database, SUCCEEDED) == wanted, f"the job with {state} succeeded")  # type: ignore[misc]
        results = client.results(len(STATES))
        fenced = running.worker.metrics.registry.get_sample_value("alphaloop_outcomes_fenced_total")
    assert {(result.status, result.attempt) for result in results} == {(Status.SUCCEEDED, 1)}
    assert (fenced, count(database, CRASHED)) == (0.0, 0)
    assert_counts_add_up(database, num_jobs=len(STATES))


@pytest.mark.parametrize("table", ["acceptance_hourly", "acceptance_state"])
def test_rows_that_an_idle_session_holds_delay_outcomes_and_nothing_else(
    worker_settings: Settings, database: Database, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresSettings, "limits", lambda settings: SessionLimits(lock_s=0.2))
    client, engine = Client(worker_settings), SteppedEngine(num_slots=4)
    engine.run_freely()
    with running_worker(worker_settings, engine) as running:
        client.send("code", [job("first")])
        client.results(1)
        with database.begin() as idle:
            assert idle.execute(text(f"SELECT count(*) FROM (SELECT FROM {table} FOR UPDATE) AS held")).scalar_one() > 0
            client.send("code", [job(f"job-{number}") for number in range(20)])
            until(lambda: len(started(engine)) == 21, "every job is decoded")
            until(lambda: len(running.worker.recorder) == 20, "every outcome waits")
            held = running.worker.leases.held()
            assert JobStore(database).renew(held, owner=running.owner, lease_s=30.0) == held.keys()
            client.send_to("control", b'{"action": "cancel", "job_id": "never-seen"}')
            until(lambda: count(database, "cancellations") == 1, "a cancellation is read meanwhile")
            assert count(database, SUCCEEDED) == 1
        results = client.results(21)
    assert {(result.status, result.attempt) for result in results} == {(Status.SUCCEEDED, 1)}
    assert count(database, CRASHED) == 0
    assert_counts_add_up(database, num_jobs=21)


@pytest.fixture
def proxy(database_url: SecretStr) -> Iterator[Proxy]:
    proxy = Proxy(urlsplit(database_url.get_secret_value()).port or 5432)
    yield proxy
    proxy.close()


def behind(proxy: Proxy, settings: Settings) -> Settings:
    """The same settings with the database behind the proxy, and leases so long that no relay hides a lost answer."""
    url = SecretStr(proxied(settings.postgres.url.get_secret_value(), proxy.port))
    return changed(settings, postgres={"url": url}, worker={"lease_s": 600.0})


def test_connections_that_break_in_mid_commit_cost_nothing(
    worker_settings: Settings, database: Database, proxy: Proxy
) -> None:
    client, names = Client(worker_settings), [f"job-{number}" for number in range(12)]
    with running_worker(behind(proxy, worker_settings), FakeEngine(num_slots=4)) as running:
        for number, name in enumerate(names):
            proxy.cut_commits(number % 2, 1)
            client.send("code", [job(name)])
            until(lambda wanted=number + 1: count(database, SUCCEEDED) == wanted, f"{name} succeeded")  # type: ignore[misc]
        results = client.results(len(names))
        fenced = running.worker.metrics.registry.get_sample_value("alphaloop_outcomes_fenced_total")
    assert {result.job_id for result in results} == set(names)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    assert (fenced, count(database, CRASHED)) == (0.0, 0)
    assert proxy.num_cuts >= len(names)
    assert_counts_add_up(database, num_jobs=len(names))
